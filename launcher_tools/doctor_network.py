"""What doctor finds of this host's place among the hosts: names, interface, ports, EFA."""

from __future__ import annotations

import collections
import contextlib
import glob
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Callable, NamedTuple

from launcher.host.network import listen, look_up, own_addresses
from launcher.job import resources
from launcher.text.words import flag, is_loopback, join_and_count, some_of
from launcher_tools.doctor_job import (
    CONNECT_SECONDS,
    NAMES_SECONDS,
    PlannedJob,
    ReportLine,
    ok,
    problem,
    warning,
)

_THREADS = 32
_AT_MOST = 2  # addresses that are tried
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_PLUGINS = (  # of aws-ofi-nccl: where AWS's installer and AWS's images put it
    "/opt/amazon/ofi-nccl/lib*",
    "/opt/amazon/ofi-nccl/lib/*-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
    "/usr/local/lib",
    "/usr/lib/*-linux-gnu",
)


class HostName(NamedTuple):
    """A host's name: its addresses, None if no answer came in time."""

    host: str
    addresses: tuple[str, ...] | None
    is_given: bool = False  # a made-up host's address, which nobody looks up

    @property
    def is_address(self) -> bool:
        """Whether no name has to resolve."""
        return self.is_given or self.addresses == (self.host,)


def check(job: PlannedJob, environ: Mapping[str, str]) -> list[ReportLine]:
    """Return what is found of names, interfaces, ports and EFA. It can take a while."""
    cluster = job.cluster
    if cluster.nnodes < 2:
        return [*efa(job, environ)]
    wanted = dict.fromkeys((cluster.hosts[0], cluster.current_host, *cluster.hosts))
    found = look_up_all(list(wanted), cluster.address, NAMES_SECONDS)
    own = found[0 if job.is_first else 1]
    return [
        *names(job, [name for name in found if name is not own]),
        *interface(job, environ, sorted(resources.network_interfaces())),
        *ports(job, found[0].addresses or (), environ),
        *efa(job, environ),
    ]


def look_up_all(
    hosts: Sequence[str], address: Callable[[str], str], seconds: float
) -> tuple[HostName, ...]:
    """Look names up side by side, the first ones first; no answer in time gives None.

    `address(host)` is what a host is looked up by.
    """
    found: dict[str, tuple[str, ...]] = {}
    left = collections.deque(hosts)

    def run() -> None:
        with contextlib.suppress(IndexError):  # no host is left
            while True:
                host = left.popleft()
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
    left.clear()
    return tuple(HostName(host, found.get(host), is_given=address(host) != host) for host in hosts)


def names(job: PlannedJob, others: Sequence[HostName]) -> Iterator[ReportLine]:
    """Say whether the names of the other hosts lead to them."""
    known = [name for name in others if name.addresses]
    wrong = []
    unknown = [name.host for name in others if name.addresses == ()]
    if unknown:
        to_do = f"a job waits for missing hosts, for up to {job.options.start_timeout} s; if they "
        to_do += "have started, check this container's DNS"
        wrong.append(warning("names", f"no address is known for {_listed(unknown)}", to_do))
    silent = [name.host for name in others if name.addresses is None]
    if silent:
        seen = f"no answer within {NAMES_SECONDS} s for {_listed(silent)}"
        to_do = "check this container's DNS (/etc/resolv.conf): a job waits for each look-up, too"
        wrong.append(warning("names", seen, to_do))
    wrong += _odd_addresses(known)
    if known and not wrong:
        shown = [f"{name.host} is {(name.addresses or ('',))[0]}" for name in known]
        verb = "are given" if all(name.is_given for name in known) else "resolve"
        yield ok("names", f"all {verb}: {_listed(shown)}")
    yield from wrong


def _odd_addresses(known: Sequence[HostName]) -> Iterator[ReportLine]:
    """Find names of other hosts that lead to this host, or to one and the same."""
    by_address: dict[str, list[str]] = {}
    here = []
    for name in known:
        if not name.is_address and all(map(is_loopback, name.addresses or ())):
            here.append(name.host)
        for address in name.addresses or ():
            by_address.setdefault(address, []).append(name.host)
    if here:
        seen = f"{_listed(here)} resolves to this host's own loopback"
        yield warning("names", seen, "remove the name from /etc/hosts, or fix DNS")
        return
    for address, hosts in by_address.items():
        if len(hosts) > 1:
            seen = f"{_listed(hosts)} all have the address {address}"
            yield warning("names", seen, "fix DNS or /etc/hosts")
            return


def interface(
    job: PlannedJob, environ: Mapping[str, str], have: Sequence[str]
) -> Iterator[ReportLine]:
    """Say which interface would be used and why. `have`: those of this host."""
    shown = _listed(have) or "none"
    named = job.cluster.network_interface_name
    if named and have and named not in have:
        seen = f"resourceconfig.json names {named}, which does not exist here; it is not used"
        yield ok("interface", seen)
    users = {name: environ[name] for name in _INTERFACES if environ.get(name)}
    for variable, value in users.items():
        if have and not _fits(variable, value, have):
            needed = "NCCL_" if job.cluster.num_gpus else "GLOO_"  # the job may not use the other
            how = problem if variable.startswith(needed) else warning
            yield how(
                "interface",
                f"{variable}={value}, but this host has {shown}",
                f"unset {variable} and let the launcher choose, or name an interface that exists",
            )
        else:
            yield ok("interface", f"{variable}={value}, as you set it")
    planned = job.plan.environment if job.plan else {}
    chosen = dict.fromkeys(planned[name] for name in _INTERFACES if name in planned)
    for name in chosen:
        yield ok("interface", f"{name} (from resourceconfig.json)")
    if not users and not chosen:
        at = "gloo uses the one at which the other hosts reach this one"
        yield ok("interface", f"none is set; this host has {shown}; {at}")


def _fits(variable: str, value: str, have: Sequence[str]) -> bool:
    """Tell whether a *_SOCKET_IFNAME of the user's fits an interface.

    Both take the beginning of a name. gloo needs all of a list; for NCCL ^ excludes, = is exact.
    """
    if variable.startswith("GLOO_"):
        return all(any(name.startswith(part) for name in have) for part in value.split(","))
    if value.startswith("^"):
        return True
    parts = [part.partition(":")[0] for part in value.lstrip("=").split(",")]
    if value.startswith("="):
        return any(name in parts for name in have)
    return any(name.startswith(tuple(parts)) for name in have)


def ports(
    job: PlannedJob, addresses: Sequence[str], environ: Mapping[str, str]
) -> Iterator[ReportLine]:
    """Say on the first host whether its ports are free, on another whether it can be reached.

    `addresses` are the first host's.
    """
    options = job.options
    wanted = [("rdzv_port", options.rdzv_port)] if job.keeps_store(environ) else []
    wanted.append(("peer_port", options.peer_port))
    for name, port in wanted:
        if job.is_first:
            own = job.cluster.address(job.cluster.current_host)
            listened = own_addresses(own)[0] if name == "peer_port" else ()
            yield from own_port(listened, port, flag(name))
        elif addresses:
            yield from first_hosts_port(job.cluster.hosts[0], addresses, port, flag(name))


def own_port(addresses: Sequence[str], port: int, option: str) -> Iterator[ReportLine]:
    """Say whether this host can listen at a port, as a job does; `option` chooses it."""
    where = f"{port} ({option})"
    try:
        for listener in listen(addresses, port):
            listener.close()
    except PermissionError:
        to_do = f"choose a port of 1024 or above with {option}, the same on every host"
        yield problem("ports", f"this user is not allowed to listen on port {where}", to_do)
    except OSError:
        if addresses:  # as a job does if the name leads elsewhere
            yield from own_port((), port, option)
            return
        to_do = "end the program that listens there (another job?), or choose another port with "
        to_do += f"{option}, the same on every host"
        yield problem("ports", f"already in use on this host: {where}", to_do)
    else:
        yield ok("ports", f"free on this host, where all hosts connect: {where}")


def first_hosts_port(
    first: str, addresses: Sequence[str], port: int, option: str
) -> Iterator[ReportLine]:
    """Say whether the first host can be reached at a port. It is told nothing."""
    where, is_reached = f"{port} ({option})", False
    for address in addresses[:_AT_MOST]:
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            is_reached = True
        except OSError:
            pass  # the next address may do
        else:
            yield ok("ports", f"{first} answers at port {where}")
            return
    if is_reached:
        yield ok("ports", f"{first} can be reached; nothing is listening yet at port {where}")
    else:
        yield warning(
            "ports",
            f"{first} did not answer at port {where}",
            "if it has started, allow traffic between the hosts of the security group, or of "
            "the network, on all ports",
        )


def efa(job: PlannedJob, environ: Mapping[str, str], root: str = "") -> Iterator[ReportLine]:
    """Say whether there is an EFA device, and what it lacks. `root` is in front of all paths."""
    if not resources.has_efa(f"{root}/sys/class/infiniband"):
        if job.cluster.nnodes > 1:
            yield ok("efa", "this host has no EFA device")
        return
    plugin = _plugin(environ, root)
    lacks_plugin = job.cluster.num_gpus and not plugin
    if lacks_plugin:
        yield warning(
            "efa",
            "this host has an EFA device, but no NCCL plugin (libnccl-net*.so) was found in "
            "LD_LIBRARY_PATH or where AWS installs it",
            "install aws-ofi-nccl in the image; without it, NCCL uses TCP",
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < 16 << 30:
        seen = f"EFA locks memory, but only {locked >> 10} KiB may be locked"
        yield warning("efa", seen, "start the container with --ulimit memlock=-1")
    elif not lacks_plugin:
        shown = f", NCCL's plugin is {plugin}" if plugin else ""
        yield ok("efa", f"this host has an EFA device{shown}")


def _plugin(environ: Mapping[str, str], root: str) -> str:
    """Return the path of NCCL's plugin for EFA, "" if it is not in the usual places."""
    folders = [glob.escape(path) for path in environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    for folder in (*folders, *(root + path for path in _PLUGINS)):
        for path in sorted(glob.glob(os.path.join(folder, "libnccl-net*.so*"))):
            return path
    return ""


def _listed(words: Sequence[str]) -> str:
    """Return the first words, and how many more there are."""
    shown = some_of(words)
    return join_and_count(shown, len(words) - len(shown))
