"""The environment that makes a host's ranks fast. Nothing that the user set is overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from launcher.job.job import Cluster
from launcher.job.resources import Resources
from launcher.text.words import plural


class _Setting(NamedTuple):
    name: str
    value: str
    why: str


def tuned(
    nproc: int | str, cluster: Cluster, resources: Resources, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to add, and the line for the log that says why (no line if none).

    `nproc` is the number of processes, or torchrun's word for it.
    """
    wanted = _of_processes(nproc, resources)
    if cluster.nnodes > 1:
        wanted += _of_network(cluster, resources)
    settings = [setting for setting in wanted if setting.name not in environ]
    if not settings:
        return {}, []
    reasons = ", ".join(f"{name}={value} ({why})" for name, value, why in settings)
    return {name: value for name, value, _ in settings}, [f"environment: {reasons}."]


def _of_processes(nproc: int | str, resources: Resources) -> list[_Setting]:
    if not isinstance(nproc, int):
        return []
    # torchrun would set 1 thread for each process, and torch by itself ignores CPU quotas.
    threads = max(1, resources.cores // nproc)
    why = f"{plural(resources.cores, 'usable core')} for {plural(nproc, 'process', 'es')}"
    return [_Setting("OMP_NUM_THREADS", str(threads), why)]


def _of_network(cluster: Cluster, resources: Resources) -> list[_Setting]:
    settings = []
    interface = cluster.network_interface_name
    # SDK v3's local mode names an interface that the container does not have.
    if interface in resources.interfaces:
        why = "from resourceconfig.json"
        settings.append(_Setting("NCCL_SOCKET_IFNAME", interface, why))
        settings.append(_Setting("GLOO_SOCKET_IFNAME", interface, "from resourceconfig.json"))
    if resources.efa:
        settings.append(_Setting("FI_PROVIDER", "efa", "this host has an EFA device"))
    # Containers of one machine have the same of what NCCL tells machines apart by.
    settings.append(_Setting("NCCL_HOSTID", cluster.current_host, "this host's name"))
    return settings
