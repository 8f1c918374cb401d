"""Facts of the network in, findings out: hosts, names, interfaces, ports, EFA. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.doctor.facts import Facts, JobFacts, Name, NetworkFacts, Port, PortState
from launcher.doctor.finding import Finding, ok, problem, warning
from launcher.text import counted, flag, some_of


def judge(facts: Facts) -> list[Finding]:
    """Return what is found of this host's place among the hosts."""
    job, network = facts.job, facts.network
    if not job.hosts:
        return []
    found = [_hosts(job)]
    if job.nnodes > 1:
        found += [*_names(job, network), *_interface(facts), *_ports(job, network.ports)]
    return [*found, *_efa(facts)]


def _hosts(job: JobFacts) -> Finding:
    if job.nnodes == 1:
        return ok("hosts", f"{job.current_host} is alone")
    rank = job.hosts.index(job.current_host)
    return ok(
        "hosts", f"{job.current_host} is node {rank} of {job.nnodes}: {_listed(list(job.hosts))}"
    )


def _names(job: JobFacts, network: NetworkFacts) -> list[Finding]:
    others = [name for name in network.names if name.host != job.current_host]
    found = []
    known = [name for name in others if name.addresses]
    silent = [name.host for name in others if name.addresses is None]
    unknown = [name.host for name in others if name.addresses == ()]
    if unknown:
        found.append(
            warning(
                "names",
                f"no address is known for {_listed(unknown)}",
                "a job waits for missing hosts, for up to "
                f"{job.start_timeout} s; if they have started, look at this container's DNS",
            )
        )
    if silent:
        found.append(
            warning(
                "names",
                f"no answer within {network.seconds:.0f} s for {_listed(silent)}",
                "look at this container's DNS (/etc/resolv.conf): each look-up of a job waits, too",
            )
        )
    found += _odd_addresses(job, known)
    if not found and known:
        shown = [f"{name.host} is {(name.addresses or ('',))[0]}" for name in known]
        found.append(ok("names", f"all resolve: {_listed(shown)}"))
    return [*found, *_own_name(job, network)]


def _odd_addresses(job: JobFacts, known: Sequence[Name]) -> list[Finding]:
    """Find names of other hosts that lead to this host, or to one and the same."""
    here = [
        name.host
        for name in known
        if name.addresses != (name.host,) and all(map(_is_loopback, name.addresses or ()))
    ]
    if here:
        return [
            warning(
                "names",
                f"{_listed(here)} resolves to this host's own loopback",
                "remove the name from /etc/hosts, or correct DNS",
            )
        ]
    by_address: dict[str, list[str]] = {}
    for name in known:
        for address in name.addresses or ():
            by_address.setdefault(address, []).append(name.host)
    for address, hosts in by_address.items():
        if len(hosts) > 1:
            return [
                warning("names", f"{_listed(hosts)} are all {address}", "correct DNS or /etc/hosts")
            ]
    return []


def _own_name(job: JobFacts, network: NetworkFacts) -> list[Finding]:
    own = next((name for name in network.names if name.host == job.current_host), None)
    if own is None or own.addresses == (own.host,):
        return []
    seen = f"{job.current_host}, this host's own name, is {', '.join(own.addresses or ())}"
    if not own.addresses:
        seen = f"{job.current_host}, this host's own name, does not resolve"
    elif not all(map(_is_loopback, own.addresses)):
        return [ok("own name", seen)]
    else:
        seen += ", which leads nobody else here"
    if job.peers:
        return [ok("own name", f"{seen}; the launcher does not need it")]
    return [
        warning(
            "own name",
            seen,
            f"without {flag('peers')} torchrun needs it: let the launchers talk, or add the name "
            "to /etc/hosts",
        )
    ]


def _interface(facts: Facts) -> list[Finding]:
    """Say which interface would be used and why."""
    job, network = facts.job, facts.network
    found = []
    for variable, value in job.users_interfaces.items():
        missing = _missing(value, network)
        if missing:
            judged = problem if variable.startswith("NCCL") and job.num_gpus else warning
            found.append(
                judged(
                    "interface",
                    f"{variable}={value}, but this host has {_interfaces(network)}",
                    f"unset {variable}: the launcher chooses; or name an interface that exists",
                )
            )
        else:
            found.append(ok("interface", f"{variable}={value}, as you set it"))
    chosen = dict.fromkeys(job.chosen_interfaces.values())
    named = job.network_interface_name
    for name in chosen:
        why = "SageMaker names it" if name == named else f"it has the address of {job.current_host}"
        addresses = ", ".join(network.interfaces.get(name, ())) or "no address seen"
        found.append(ok("interface", f"{name} ({addresses}): {why}"))
    if named and named not in network.interfaces and network.interfaces:
        found.append(
            ok("interface", f"SageMaker names {named}, which does not exist here; it is not used")
        )
    if not found and job.error == "":
        seen = f"none is set; this host has {_interfaces(network)}"
        if job.peers:
            seen += "; gloo gets the one at which the other hosts find this one"
        found.append(ok("interface", seen))
    return found


def _missing(value: str, network: NetworkFacts) -> bool:
    """Tell whether a *_SOCKET_IFNAME of the user's fits no interface (^ excludes, = is exact)."""
    if not network.interfaces or value.startswith("^"):
        return False
    exact = value.startswith("=")
    wanted = [part.partition(":")[0] for part in value.lstrip("=").split(",")]
    return not any(
        have == part if exact else have.startswith(part)
        for part in wanted
        for have in network.interfaces
    )


def _ports(job: JobFacts, ports: Sequence[Port]) -> list[Finding]:
    """Say of all ports in the same state what it is, in one line."""
    found = []
    for state in dict.fromkeys(port.state for port in ports):
        same = [port for port in ports if port.state is state]
        where = " and ".join(f"{port.number} ({port.option})" for port in same)
        options = " or ".join(port.option for port in same)
        found.append(_port(job.hosts[0], state, where, options))
    return found


def _port(first: str, state: PortState, where: str, options: str) -> Finding:
    if state is PortState.FREE:
        return ok("ports", f"free on this host, where the others meet: {where}")
    if state is PortState.TAKEN:
        return problem(
            "ports",
            f"taken on this host: {where}",
            f"end what listens there, or choose another with {options} on every host",
        )
    if state is PortState.DENIED:
        return problem(
            "ports",
            f"this user may not listen on {where}",
            f"choose a port of 1024 or above with {options}, the same on every host",
        )
    if state is PortState.ANSWERS:
        return ok("ports", f"{first} answers at {where}")
    if state is PortState.REFUSES:
        return ok("ports", f"{first} can be reached; nothing listens yet at {where}")
    return warning(
        "ports",
        f"{first} did not answer at {where}",
        "if it has started, let hosts of the security group, or of the network, reach each other "
        "at all ports",
    )


def _efa(facts: Facts) -> list[Finding]:
    network = facts.network
    if not network.efa:
        return [ok("efa", "this host has no EFA device")] if facts.job.nnodes > 1 else []
    found = []
    if facts.job.num_gpus and not network.efa_plugin:
        found.append(
            warning(
                "efa",
                "this host has an EFA device, but no plugin for NCCL (libnccl-net*.so) was found "
                "in LD_LIBRARY_PATH or where AWS puts it",
                "install aws-ofi-nccl in the image, or NCCL uses TCP",
            )
        )
    if network.locked_memory is not None and network.locked_memory < 16 << 30:
        found.append(
            warning(
                "efa",
                f"EFA locks memory, and only {network.locked_memory >> 10} KiB may be locked",
                "start the container with --ulimit memlock=-1",
            )
        )
    plugin = f", NCCL's plugin is {network.efa_plugin}" if network.efa_plugin else ""
    return found or [ok("efa", f"this host has an EFA device{plugin}")]


def _interfaces(network: NetworkFacts) -> str:
    return _listed(sorted(network.interfaces)) or "none"


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _listed(words: Sequence[str]) -> str:
    shown = some_of(words)
    return counted(shown, len(words) - len(shown))
