"""Facts of the network in, findings out: hosts, names, ports. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.text import flag, is_loopback
from launcher_tools import doctor_judge_interface
from launcher_tools.doctor_facts import (
    Facts,
    JobFacts,
    Name,
    NetworkFacts,
    Port,
    PortState,
)
from launcher_tools.doctor_finding import Finding, listed, ok, problem, warning


def judge(facts: Facts) -> list[Finding]:
    """Return what is found of this host's place among the hosts."""
    job, network = facts.job, facts.network
    if not job.hosts:
        return []
    found = [_hosts(job)]
    if "network" in facts.late:
        seen = "names and ports could not be looked at in time"
        found.append(warning("names", seen, "look at this container's DNS, and run it again"))
    elif job.nnodes > 1:
        found += [
            *_names(job, network),
            *doctor_judge_interface.interface(facts),
            *_ports(job, network.ports),
        ]
    return [*found, *doctor_judge_interface.efa(facts)]


def _hosts(job: JobFacts) -> Finding:
    if job.nnodes == 1:
        return ok("hosts", f"{job.current_host} is alone")
    rank = job.hosts.index(job.current_host)
    return ok(
        "hosts", f"{job.current_host} is node {rank} of {job.nnodes}: {listed(list(job.hosts))}"
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
                f"no address is known for {listed(unknown)}",
                "a job waits for missing hosts, for up to "
                f"{job.start_timeout} s; if they have started, look at this container's DNS",
            )
        )
    if silent:
        found.append(
            warning(
                "names",
                f"no answer within {network.seconds:.0f} s for {listed(silent)}",
                "look at this container's DNS (/etc/resolv.conf): each look-up of a job waits, too",
            )
        )
    found += _odd_addresses(job, known)
    if not found and known:
        shown = [f"{name.host} is {(name.addresses or ('',))[0]}" for name in known]
        verb = "are given" if all(name.is_given for name in known) else "resolve"
        found.append(ok("names", f"all {verb}: {listed(shown)}"))
    return [*found, *_own_name(job, network)]


def _odd_addresses(job: JobFacts, known: Sequence[Name]) -> list[Finding]:
    """Find names of other hosts that lead to this host, or to one and the same."""
    here = [
        name.host
        for name in known
        if not name.is_address and all(map(is_loopback, name.addresses or ()))
    ]
    if here:
        return [
            warning(
                "names",
                f"{listed(here)} resolves to this host's own loopback",
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
                warning("names", f"{listed(hosts)} are all {address}", "correct DNS or /etc/hosts")
            ]
    return []


def _own_name(job: JobFacts, network: NetworkFacts) -> list[Finding]:
    own = next((name for name in network.names if name.host == job.current_host), None)
    if own is None or own.is_address:
        return []
    seen = f"{job.current_host}, this host's own name, is {', '.join(own.addresses or ())}"
    if not own.addresses:
        seen = f"{job.current_host}, this host's own name, does not resolve"
    elif not all(map(is_loopback, own.addresses)):
        return [ok("own name", seen)]
    else:
        seen += ", which leads nobody else here"
    if job.peers:
        return [ok("own name", f"{seen}; the launcher does not need it")]
    # The first host's torchrun cannot even keep its store there; gloo and others may fail.
    judged = problem if own.addresses == () and job.is_first and network.ports else warning
    return [
        judged(
            "own name",
            seen,
            f"without {flag('peers')} torchrun needs it: let the launchers talk, or add the name "
            "to /etc/hosts",
        )
    ]


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
            f"end what listens there (a job that runs here?), or choose another with {options}, "
            "the same on every host",
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
