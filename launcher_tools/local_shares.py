"""What each host gets of this machine: an address, cores, GPUs; and the ports that they share."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from launcher.errors import LaunchError
from launcher.job import resources
from launcher.signals import Signals

_T = TypeVar("_T")
# Below Linux's ephemeral ports (ip(7), ip_local_port_range): the kernel gives them to nobody.
_PORTS = range(20000, 29000)


class Share(NamedTuple):
    """One host's part of this machine."""

    address: str
    cpus: frozenset[int]  # what its processes may run on; empty: all
    cores: int  # physical ones
    gpus: tuple[str, ...] | None  # UUIDs; None: this machine has none


def shares(count: int, environ: Mapping[str, str], signals: Signals | None = None) -> list[Share]:
    """Divide this machine among `count` hosts, all equal, as SageMaker's are.

    Raises LaunchError if there are fewer loopback addresses.
    """
    found = addresses(count)
    cores = divided(resources.physical_cores(), count) or [()] * count
    seen = gpus(environ, signals)
    parts = divided(seen, count) if len(seen) >= count else [()] * count
    return [
        Share(
            address,
            frozenset(cpu for core in own for cpu in core),
            max(1, len(own)),
            tuple(part) if seen else None,
        )
        for address, own, part in zip(found, cores, parts)
    ]


def divided(things: Sequence[_T], count: int) -> list[Sequence[_T]]:
    """Return equal parts of some things; if there are fewer than parts, some parts are the same."""
    if not things:
        return []
    if len(things) < count:
        return [[things[number % len(things)]] for number in range(count)]
    size = len(things) // count
    return [things[number * size : (number + 1) * size] for number in range(count)]


def addresses(count: int) -> list[str]:
    """Return `count` loopback addresses of this machine, 127.0.0.1 first.

    Raises LaunchError, which says how to add them.
    """
    found = [f"127.0.0.{number}" for number in range(1, count + 1)]
    for address in found:
        try:
            with socket.socket() as probe:
                probe.bind((address, 0))
        except OSError as error:
            raise LaunchError(
                f"{address} is not an address of this machine ({error.strerror}); add all "
                f"up to {found[-1]} as root: `ip address add {address}/8 dev lo` on Linux, "
                f"`ifconfig lo0 alias {address}` on macOS."
            ) from None
    return found


def free_ports(count: int) -> list[int]:
    """Return different free ports, at random: two jobs at once do not get the same."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        try:
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise LaunchError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free; end what has them.")


def gpus(environ: Mapping[str, str], signals: Signals | None = None) -> list[str]:
    """Return the UUIDs of this machine's GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    A host sees its GPUs by their UUIDs: by their numbers, the second host's would not begin at 0.
    """
    lines = resources.gpus(environ, signals)
    found = [
        match[1] for match in (re.search(r"UUID: (GPU-[\w-]+)", line) for line in lines) if match
    ]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = []
    for entry in visible.split(",")[: resources.visible_gpus(len(found), environ)]:
        entry = entry.strip()
        chosen.append(found[int(entry)] if entry.isdecimal() else entry)
    return chosen
