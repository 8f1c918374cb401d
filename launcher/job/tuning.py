"""The environment that makes a host's ranks fast. Nothing that the user set is overwritten."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.job.job import Cluster
from launcher.job.resources import Resources
from launcher.text.words import plural


def tuned(
    nproc: int | str, cluster: Cluster, resources: Resources, environ: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Return the variables to add, and what the log says of them ("" if there are none).

    `nproc` is the number of processes, or torchrun's word for it.
    """
    wanted: list[tuple[str, str, str]] = []  # each a variable, its value, and why
    if isinstance(nproc, int):
        # torchrun would set 1 thread for each process, and torch by itself ignores CPU quotas.
        cores, threads = resources.cores, max(1, resources.cores // nproc)
        why = f"{plural(cores, 'usable core')} for {plural(nproc, 'process', 'es')}"
        wanted.append(("OMP_NUM_THREADS", str(threads), why))
    if cluster.nnodes > 1:
        interface = cluster.network_interface_name
        # SDK v3's local mode names an interface that the container does not have.
        if interface in resources.interfaces:
            for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
                wanted.append((name, interface, "from resourceconfig.json"))
        if resources.efa:
            wanted.append(("FI_PROVIDER", "efa", "this host has an EFA device"))
        # Containers of one machine have the same of what NCCL tells machines apart by.
        wanted.append(("NCCL_HOSTID", cluster.current_host, "this host's name"))
    settings = [setting for setting in wanted if setting[0] not in environ]
    reasons = ", ".join(f"{name}={value} ({why})" for name, value, why in settings)
    made = {name: value for name, value, _ in settings}
    return made, f"environment: {reasons}" if settings else ""
