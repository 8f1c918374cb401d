"""Facts of interfaces and EFA in, findings out. Pure."""

from __future__ import annotations

from launcher.text import is_loopback
from launcher_tools.doctor_facts import Facts, Name, NetworkFacts
from launcher_tools.doctor_finding import Finding, listed, ok, problem, warning


def interface(facts: Facts) -> list[Finding]:
    """Say which interface would be used and why."""
    job, network = facts.job, facts.network
    found, unused = [], []
    for variable, value in job.users_interfaces.items():
        missing = _missing(variable, value, network)
        if missing:
            needed = "NCCL_" if job.num_gpus else "GLOO_"  # the other may be of no use to the job
            judged = problem if variable.startswith(needed) else warning
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
        addresses = ", ".join(network.interfaces.get(name, ())) or "no address seen"
        found.append(ok("interface", f"{name} ({addresses}): SageMaker names it"))
    if named and named not in network.interfaces and network.interfaces:
        unused.append(
            ok("interface", f"SageMaker names {named}, which does not exist here; it is not used")
        )
    if not found:
        own = next((name for name in network.names if name.host == job.current_host), None)
        there = _with_address(own, network)
        if there:
            seen = f"{there} ({', '.join(network.interfaces[there])}): it has the address of "
            return [*unused, ok("interface", seen + job.current_host)]
        seen = f"none is set; this host has {_interfaces(network)}"
        if job.peers:
            seen += "; gloo gets the one at which the other hosts find this one"
        found.append(ok("interface", seen))
    return [*unused, *found]


def _with_address(own: Name | None, network: NetworkFacts) -> str:
    """Return the interface with an address of the host's own name, never the loopback."""
    addresses = [one for one in (own and own.addresses) or () if not is_loopback(one)]
    for interface, have in network.interfaces.items():
        if any(address in have for address in addresses):
            return interface
    return ""


def _missing(variable: str, value: str, network: NetworkFacts) -> bool:
    """Tell whether a *_SOCKET_IFNAME of the user's fits no interface.

    Both take the beginning of a name. gloo needs all of a list; for NCCL ^ excludes, = is exact.
    """
    if not network.interfaces:
        return False
    if variable.startswith("GLOO_"):
        parts = value.split(",")
        return not all(any(have.startswith(p) for have in network.interfaces) for p in parts)
    if value.startswith("^"):
        return False
    exact = value.startswith("=")
    wanted = [part.partition(":")[0] for part in value.lstrip("=").split(",")]
    return not any(
        have == part if exact else have.startswith(part)
        for part in wanted
        for have in network.interfaces
    )


def efa(facts: Facts) -> list[Finding]:
    """Say whether there is an EFA device, and what it lacks."""
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
    return listed(sorted(network.interfaces)) or "none"
