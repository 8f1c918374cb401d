"""Names, interfaces and ports of this host, and of the first one."""

from __future__ import annotations

import glob
import os
import resource
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Callable

from launcher.doctor.facts import Name, Port, PortState
from launcher.job import resources
from launcher.job.options import Options
from launcher.names import look_up
from launcher.system import listen, own_addresses
from launcher.text import flag

_THREADS = 32
_TO_CONNECT, _AT_MOST = 2, 2  # seconds, addresses
_PLUGINS = (  # of aws-ofi-nccl: where AWS's installer and AWS's images put it
    "/opt/amazon/ofi-nccl/lib*",
    "/opt/amazon/ofi-nccl/lib/*-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
    "/usr/local/lib",
    "/usr/lib/*-linux-gnu",
)


def look_up_all(
    hosts: Sequence[str], address: Callable[[str], str], seconds: float
) -> tuple[Name, ...]:
    """Look names up side by side, the first ones first; no answer in time gives None.

    `address(host)` is what a host is looked up by.
    """
    found: dict[str, tuple[str, ...]] = {}
    left, lock = list(reversed(hosts)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if not left:
                    return
                host = left.pop()
            addresses = (str(at[0]) for _, at in look_up(address(host)))
            found[host] = tuple(dict.fromkeys(addresses))

    deadline = time.monotonic() + seconds
    threads = []
    for _ in range(min(_THREADS, len(hosts))):
        thread = threading.Thread(target=run, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads in this container
            break
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        left.clear()
    return tuple(Name(host, found.get(host), is_given=address(host) != host) for host in hosts)


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each interface; none of them if psutil is not installed."""
    names = dict.fromkeys(sorted(resources.network_interfaces()), ())
    try:
        import psutil

        found = psutil.net_if_addrs()
    except (ImportError, OSError):
        return dict(names)
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        **names,
        **{
            name: tuple(entry.address for entry in entries if entry.family in families)
            for name, entries in found.items()
        },
    }


def ports_here(current_host: str, chosen: Options, *, rdzv: bool) -> tuple[Port, ...]:
    """See on the first host whether its ports are free: listen as a job does, for a moment."""
    found = []
    if rdzv:
        found.append(Port(chosen.rdzv_port, flag("rdzv_port"), _state([], chosen.rdzv_port)))
    if chosen.peers:
        own, _ = own_addresses(current_host)
        found.append(Port(chosen.peer_port, flag("peer_port"), _state(own, chosen.peer_port)))
    return tuple(found)


def _state(addresses: Sequence[str], port: int) -> PortState:
    try:
        for listener in listen(addresses, port):
            listener.close()
    except PermissionError:
        return PortState.DENIED
    except OSError:
        if addresses:  # as a job does if the name leads elsewhere
            return _state([], port)
        return PortState.TAKEN
    return PortState.FREE


def ports_there(addresses: Sequence[str], chosen: Options, *, rdzv: bool) -> tuple[Port, ...]:
    """See from another host whether the first one can be reached. It is told nothing."""
    wanted = [(chosen.rdzv_port, "rdzv_port")] if rdzv else []
    wanted += [(chosen.peer_port, "peer_port")] if chosen.peers else []
    return tuple(Port(port, flag(field), _answer(addresses, port)) for port, field in wanted)


def _answer(addresses: Sequence[str], port: int) -> PortState:
    state = PortState.SILENT
    for address in addresses[:_AT_MOST]:
        try:
            socket.create_connection((address, port), timeout=_TO_CONNECT).close()
            return PortState.ANSWERS
        except ConnectionRefusedError:
            state = PortState.REFUSES
        except OSError:
            pass  # the next address may do
    return state


def efa_plugin(environ: Mapping[str, str]) -> str:
    """Return the path of NCCL's plugin for EFA, "" if it is not in the usual places."""
    folders = [glob.escape(path) for path in environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    for folder in (*folders, *_PLUGINS):
        for path in sorted(glob.glob(os.path.join(folder, "libnccl-net*.so*"))):
            return path
    return ""


def locked_memory() -> int | None:
    """Return the bytes of memory that may be locked, None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
