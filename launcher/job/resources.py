"""This host's devices, cores, network interfaces and torch.

All of it is read from the system, without importing torch (about 1 s and 200 MB). If the system
does not know, there is a usable default.
"""

from __future__ import annotations

import glob
import importlib.machinery
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.errors import LaunchError, NotFoundError, UnexpectedError
from launcher.host import cgroups
from launcher.host.cgroups import read_text
from launcher.host.child import ask
from launcher.host.network import look_up
from launcher.host.signals import Signals
from launcher.job.options import checked, whole
from launcher.text.log import log
from launcher.text.words import is_loopback

# Seconds. nvidia-smi has been seen to block on a broken driver; a job that costs money must not.
_ASK_TIMEOUT = 60
_printed: dict[str, str] = {}  # what drivers' commands have printed, by the commands' paths
_TORCHRUN = os.path.join("distributed", "run.py")
_DEVICE = re.compile(r"^ *(GPU|MIG) (?:\d+: )?(.*?) *(?:\(UUID: ([^)\s]+)\))?$", re.MULTILINE)


class Resources(NamedTuple):
    """The facts of one host that a plan depends on."""

    python: str  # the interpreter that runs torchrun and the ranks
    torch: str  # its version, such as 2.13.0+cpu
    cores: int  # physical cores that this process may use
    interfaces: frozenset[str]
    efa: bool
    torchrun: str = ""  # the source of its torchrun

    @property
    def torch_version(self) -> tuple[int, int]:
        """Its first two numbers: which options its torchrun has."""
        major, minor = re.findall(r"\d+", self.torch)[:2]
        return int(major), int(minor)


def read_resources() -> Resources:
    """Return the facts of this host.

    Raises LaunchError if torch or its torchrun (exit code 127) or psutil (2) is not installed.
    """
    folder = torch_folder()
    _require_psutil()
    return Resources(
        python=sys.executable,
        torch=torch_version(folder),
        cores=len(physical_cores()),
        interfaces=network_interfaces(),
        efa=has_efa(),
        torchrun=read_text(os.path.join(folder, _TORCHRUN)),
    )


def _require_psutil() -> None:
    try:
        import psutil  # noqa: F401 (interface_of needs it)
    except ImportError as error:  # or its C extension does not load
        raise LaunchError(
            f"psutil cannot be imported by {sys.executable} ({error}); install it there."
        ) from None


def torch_folder() -> str:
    """Return the folder of the torch that a child process would import.

    Raises LaunchError (exit code 127) if there is none, or one without torchrun.
    """
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None:
        from importlib.util import find_spec  # 4 ms, for an editable install's own finder

        spec = find_spec("torch")
    folder = next(iter((spec and spec.submodule_search_locations) or [""]))
    if not os.path.isfile(os.path.join(folder, _TORCHRUN)):
        problem = f"in {folder} has no torch.distributed.run" if folder else "is not installed"
        raise NotFoundError(
            f"torch {problem} for {sys.executable}; install torch 2.4 or later there, or run the "
            "launcher with the Python that has it."
        )
    return folder


def torch_version(folder: str) -> str:
    """Return a torch's version, from torch/version.py: importlib.metadata takes 12 ms longer."""
    version = read_text(os.path.join(folder, "version.py"))
    match = re.search(r"__version__ = '(\d+\.\d+[^'\n]*)'", version)
    if not match:
        log(f"cannot read the version of torch in {folder}; assuming 2.4.")
    return match[1] if match else "2.4"


class Gpu(NamedTuple):
    """A GPU of `nvidia-smi -L`, and its MIG slices, if it is in MIG mode and has any."""

    uuid: str
    slices: tuple[str, ...] = ()  # their UUIDs
    name: str = ""  # of its model

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs of its slices, otherwise its own."""
        return self.slices or (self.uuid,)


def gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that `nvidia-smi -L` lists, as the toolkit counts them.

    A driver may block for ever; a stop ends the wait, and then there are none.
    """
    found: list[Gpu] = []
    for kind, name, uuid in _DEVICE.findall(_ask("nvidia-smi", "-L", environ)):
        if kind == "GPU":
            found.append(Gpu(uuid, name=name))
        elif found:  # a slice, below its GPU
            found[-1] = found[-1]._replace(slices=(*found[-1].slices, uuid or "MIG-"))
    return found


def visible_gpus(found: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order.

    A GPU without a UUID gets its index; one that was not found has only the name in its entry. CUDA
    ignores entries after the first invalid one (programming guide, "Environment Variables"). Raises
    LaunchError for a repeated GPU: torch would see none.
    """
    found = [gpu if gpu.uuid else gpu._replace(uuid=f"{n}") for n, gpu in enumerate(found)]
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return found
    visible: list[Gpu] = []
    for entry in map(str.strip, entries.split(",")):
        if entry.isdecimal() and len(entry) < 6 and int(entry) < len(found):
            visible.append(found[int(entry)])
        elif found and entry.startswith(("GPU-", "MIG-")):
            # CUDA takes the beginning of a UUID.
            matches = (gpu for gpu in found if gpu.uuid.startswith(entry))
            visible.append(next(matches, Gpu(entry)))
        else:
            break
    if len({gpu.uuid for gpu in visible}) < len(visible):
        raise UnexpectedError("CUDA_VISIBLE_DEVICES", entries, "each GPU once")
    return visible


def count(variable: str, environ: Mapping[str, str]) -> int | None:
    """Return a number of devices; None if the variable is not set, or empty (unknown)."""
    text = environ.get(variable)
    return checked(variable, text, whole(0, 99999)) if text else None


def count_neuron_cores(instance_type: str, environ: Mapping[str, str]) -> int:
    """Return the Neuron cores of this host as the toolkit counts them: SM_NUM_NEURONS, neuron-ls.

    A stop ends the wait, as in `gpus`.
    """
    cores = count("SM_NUM_NEURONS", environ)
    if cores is not None:
        return cores
    if "trn2.48xlarge" in instance_type:
        return 64  # neuron-ls lists 128 physical cores there; a process uses them in pairs
    answer = _ask("neuron-ls", "-j", environ)
    try:
        return sum(int(device.get("nc_count", 0)) for device in json.loads(answer or "[]"))
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
        log(f"cannot read the output of neuron-ls -j ({answer[:80]!r}); assuming no Neuron cores.")
        return 0


def _ask(command: str, option: str, environ: Mapping[str, str]) -> str:
    """Return what a driver's command prints; "" if it is missing, has failed, or a stop comes.

    It is run once: it may take seconds, or hang.
    """
    import shutil  # 2.4 ms, with what it imports

    path = shutil.which(command, path=environ.get("PATH"))
    if path is None or Signals.stop:
        return ""
    if path not in _printed:
        answer = ask([path, option], environ, _ASK_TIMEOUT)
        if Signals.stop:
            return ""
        if answer.problem:
            # Tell users who pay for a GPU that they train on a CPU.
            log(f"{command} {option} failed ({answer.problem}); continuing without its list.")
        _printed[path] = "" if answer.problem else answer.out
    return _printed[path]


def physical_cores() -> list[set[int]]:
    """Return the CPUs of each core that this process may use, of at least one core.

    The affinity mask and the cgroup's CPU quota limit them: in a container that may use 4 of 96
    cores, 96 threads in each process would starve each other. Hyper-threads of one core have the
    same list of siblings (kernel, Documentation/admin-guide/cputopology.rst).
    """
    cores: dict[object, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or cpu, set()).add(cpu)
    quota = cgroup_cpus()
    return list(cores.values())[: None if quota is None else max(1, int(quota))]


def cgroup_cpus(root: str = "") -> float | None:
    """Return the CPUs that the tightest cgroup quota allows, None if there is no quota.

    cgroup v2: cpu.max of this process's group and of all above it; v1: cpu.cfs_quota_us
    (kernel, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst).
    """
    quotas = []
    for folder in cgroups.folders("cpu", root):
        quota, _, period = read_text(f"{folder}/cpu.max").strip().partition(" ")
        if not quota:
            quota = read_text(f"{folder}/cpu.cfs_quota_us").strip()
            period = read_text(f"{folder}/cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def network_interfaces() -> frozenset[str]:
    """Return the names of this host's network interfaces."""
    try:
        return frozenset(name for _, name in socket.if_nameindex())
    except OSError:  # a sandbox without netlink
        return frozenset()


def interface_of(host: str) -> str:
    """Return the network interface that has an address of this name; "" if none has.

    Never the loopback: other hosts could not reach it.
    """
    found = {str(address[0]) for _, address in look_up(host)}
    addresses = {address for address in found if not is_loopback(address)}
    if not addresses:
        return ""
    import psutil  # not at the top: read_resources reports problems with it

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address in addresses for entry in entries):
            return name
    return ""


def has_efa(root: str = "/sys/class/infiniband") -> bool:
    """Tell whether this host has an Elastic Fabric Adapter: an RDMA device with that driver."""
    drivers = glob.glob(f"{root}/*/device/driver")
    return any(os.path.basename(os.path.realpath(driver)) == "efa" for driver in drivers)
