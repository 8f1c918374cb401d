"""The hosts, which of them this is, its devices, and the job's name.

This is read from the `SM_*` variables that the SageMaker toolkit (or SDK v3's driver) makes, or
that toolkit.py makes from the config files; without either, this host is alone. Nothing has checked
those variables before, so all of them are checked here.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import LaunchError, UnexpectedError
from launcher.job import resources, toolkit
from launcher.job.job import Cluster
from launcher.job.options import HOST_ADDRESSES
from launcher.job.resources import Gpu
from launcher.text.words import flag, listed

ALONE = "localhost"


def read_cluster(environ: Mapping[str, str], instance_groups: Sequence[str] = ()) -> Cluster:
    """Return the cluster that the environment describes, limited to some instance groups.

    A stop ends the wait for the devices' drivers; then there are no devices.
    Raises LaunchError, which names the variable, if the description is invalid.
    """
    if "SM_HOSTS" in environ:
        hosts = _hosts(toolkit.decoded(environ["SM_HOSTS"]), "SM_HOSTS")
        current_host = environ.get("SM_CURRENT_HOST", "")
        if current_host not in hosts:
            seen = f"is {current_host!r}" if "SM_CURRENT_HOST" in environ else "is not set"
            raise LaunchError(
                f"SM_CURRENT_HOST {seen}, but SM_HOSTS names {listed(hosts)}; expected one of them."
            )
    else:
        current_host = environ.get("SM_CURRENT_HOST") or ALONE
        hosts = (current_host,)
    instance_type = environ.get("SM_CURRENT_INSTANCE_TYPE", "")
    # The job's name is made from all hosts, so that it does not depend on the chosen groups.
    job_name = _job_name(hosts, environ)
    if instance_groups:
        hosts = _hosts_of_groups(hosts, instance_groups, environ)
    gpus, mig, models = _gpus(environ)
    return Cluster(
        hosts=tuple(sorted(hosts)),
        current_host=current_host,
        job_name=job_name,
        num_gpus=gpus,
        num_neurons=resources.count_neuron_cores(instance_type, environ),
        network_interface_name=environ.get("SM_NETWORK_INTERFACE_NAME", ""),
        addresses=_addresses(toolkit.decoded(environ.get(HOST_ADDRESSES) or "{}")),
        mig=mig,
        gpu_models=models,
        is_described="SM_HOSTS" in environ,
    )


def _gpus(environ: Mapping[str, str]) -> tuple[int, int, tuple[str, ...]]:
    """Return how many GPUs a process sees, `mig`, and the GPUs' models.

    A process sees at most one MIG slice, and with it no GPU without slices (MIG User Guide,
    "CUDA Device Enumeration"). The toolkit, which makes SM_NUM_GPUS, counts no slices.
    """
    count = resources.count("SM_NUM_GPUS", environ)
    counted = [Gpu("")] * (count or 0)
    is_needed = count is None or resources.visible_gpus(counted, environ)
    found = resources.gpus(environ) if is_needed else []
    visible = resources.visible_gpus([*found, *counted][:count], environ)
    models = tuple(dict.fromkeys(gpu.name for gpu in visible if gpu.name))
    devices = [device for gpu in visible for device in gpu.devices]
    if any(device.startswith("MIG-") for device in devices):
        return 1, len(devices), models
    return len(visible), 0, models


def _hosts(value: Any, where: str) -> tuple[str, ...]:
    """Check a list of host names."""
    if isinstance(value, list) and value and all(_is_host(host) for host in value):
        if len(set(value)) == len(value):
            return tuple(value)
    expected = 'a JSON list of different host names such as ["algo-1", "algo-2"]'
    raise UnexpectedError(where, value, expected)


def _addresses(value: Any) -> dict[str, str]:
    if not (isinstance(value, dict) and all(map(_is_host, value.values()))):
        raise UnexpectedError(HOST_ADDRESSES, value, "a JSON object with an address for each host")
    return value


def _is_host(value: Any) -> bool:
    # torchrun allows no other characters in a rendezvous endpoint (rendezvous/utils.py).
    return isinstance(value, str) and re.fullmatch(r"[\w.:-]+", value, re.ASCII) is not None


def _job_name(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the job's name, the same on all its hosts.

    The toolkit sets SAGEMAKER_JOB_NAME to "" unless the SDK named the job; torchrun would
    replace an empty id by a random one on each host, and they would never meet.
    """
    for variable in ("TRAINING_JOB_NAME", "SAGEMAKER_JOB_NAME"):
        name = environ.get(variable, "")
        if name and not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            # torchrun makes folders with that name.
            raise UnexpectedError(variable, name, "letters, digits, '-', '_' and '.'")
        if name:
            return name
    return f"job-{zlib.crc32(json.dumps(sorted(hosts)).encode()):08x}"


def _hosts_of_groups(
    hosts: Sequence[str], names: Sequence[str], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the hosts of the named instance groups of a heterogeneous cluster."""
    variable = "SM_INSTANCE_GROUPS_DICT"
    groups = toolkit.decoded(environ.get(variable) or "null")
    if groups is None:  # SDK v3 makes SM_HOSTS, but not these
        files = toolkit.read_config(environ)
        groups = toolkit.instance_groups(files.resource_config) if files else {}
    try:
        members = {name: {*group["hosts"]} for name, group in groups.items()}
        is_valid = all(each and each <= {*hosts} for each in members.values())
    except (AttributeError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        expected = f"a JSON object of groups with hosts among {listed(hosts)}"
        raise UnexpectedError(variable, groups, expected)
    if missing := [name for name in names if name not in members]:
        expected = f"names of this cluster's instance groups: {', '.join(sorted(groups)) or 'none'}"
        raise UnexpectedError(flag("instance_groups"), missing[0], expected)
    chosen = {host for name in names for host in members[name]}
    return tuple(host for host in hosts if host in chosen)
