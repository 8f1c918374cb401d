"""What doctor finds of this machine: folders, open files, devices, and torch.

`root` is in front of /proc, /sys and /dev, for tests.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launcher.errors import LaunchError
from launcher.host.cgroups import read_text
from launcher.host.child import Answer
from launcher.host.run_dir import run_dir
from launcher.job import resources, toolkit
from launcher.job.resources import FEWEST_FILES
from launcher.result.failure import output_dir
from launcher.text.words import flag, plural
from launcher_tools.doctor_job import PlannedJob, ReportLine, ok, problem, warning

_SHM = "/dev/shm"
_SHM_USE = "data loader workers and NCCL pass data through it"
_LITTLE_SHM, _LITTLE_DISK = 512 << 20, 1 << 30  # bytes; Docker's default of the first is 64 MiB
_DESCRIPTORS = 30  # that the first launcher needs besides one for each host
_FILES = 1024
_OLDEST_TORCH = (2, 4)
_REPLACE = "replace this host, or its driver"
_FOLDERS = {  # what is to be done if one cannot be written to, or is too small, by what it is for
    _SHM_USE: (warning, "start the container with --shm-size=2g or more (SageMaker does)"),
    flag("log_dir"): (problem, "name a folder that this user may write to"),
    "TMPDIR": (problem, ""),  # the launcher's own message says it
}


def check(job: PlannedJob, environ: Mapping[str, str]) -> list[ReportLine]:
    """Return what is found of folders and open files. A file system may hang for ever."""
    return [*disk(environ, job.options.log_dir), *open_files(job)]


def size(number: float) -> str:
    """Return a number of bytes for people: `63 MiB`, `1.5 GiB`."""
    number /= 1 << 20
    if number < 1024:
        return f"{number:.0f} MiB"
    number /= 1024
    return f"{number:.1f} GiB" if number < 10 else f"{number:.0f} GiB"


def disk(environ: Mapping[str, str], log_dir: str = "") -> Iterator[ReportLine]:
    """Find each folder that is of no use; the others of one disk are one line."""
    fine: dict[str, list[str]] = {}
    for path, use in _folders(environ, log_dir):
        where = f"{path} ({use})"
        how, to_do = _FOLDERS.get(use, (warning, ("create it, or make it writable for this user")))
        try:
            if use == "TMPDIR":  # where a job makes a folder
                with run_dir(environ):
                    pass
            seen = _writable(path)
        except (OSError, LaunchError) as error:
            why = str(getattr(error, "strerror", error)).rstrip(".")
            yield how("disk", f"{where}: {why}", to_do)
            continue
        little = _LITTLE_SHM
        if use != _SHM_USE:
            little, to_do = _LITTLE_DISK, "raise volume_size of the estimator, or remove files"
        free, has_no_inodes = seen.f_bavail * seen.f_frsize, seen.f_files and not seen.f_favail
        if has_no_inodes or free < little:
            remaining = "no files" if has_no_inodes else size(free)
            yield warning("disk", f"{where}: {remaining} left", to_do)
        else:
            fine.setdefault(size(free), []).append(where)
    for free_size, places in fine.items():
        yield ok("disk", f"{free_size} free: {', '.join(places)}")


def _folders(environ: Mapping[str, str], log_dir: str) -> Iterator[tuple[str, str]]:
    """Yield the folders that a job writes to, and what they are for."""
    base = toolkit.base_dir(environ)
    if "SM_HOSTS" in environ or os.path.isdir(os.path.join(base, "input", "config")):
        yield environ.get("SM_MODEL_DIR") or os.path.join(base, "model"), "the model"
        yield output_dir(environ), "the failure reason"
    checkpoints = os.path.join(base, "checkpoints")
    if os.path.isdir(checkpoints):
        yield checkpoints, "checkpoints"
    if log_dir:
        there = os.path.abspath(log_dir)
        while not os.path.exists(there) and os.path.dirname(there) != there:
            there = os.path.dirname(there)  # the launcher makes the rest
        yield there, flag("log_dir")
    yield environ.get("TMPDIR") or "/tmp", "TMPDIR"
    yield _SHM, _SHM_USE


def _writable(folder: str) -> os.statvfs_result:
    """Return what is left in a folder. Raises OSError if nothing can be made there."""
    seen = os.statvfs(folder)
    if not os.path.isdir(folder):
        raise OSError(errno.ENOTDIR, "it is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "this user may not write to it")
    return seen


def open_files(job: PlannedJob) -> Iterator[ReportLine]:
    """Say how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    nnodes = job.cluster.nnodes
    needs = nnodes + _DESCRIPTORS
    seen = f"{_limit(soft)}, {_limit(hard)} (soft, hard)"
    raise_it = f"start the container with --ulimit nofile={max(needs, 65536)}"
    if nnodes > 1 and job.is_first and _is_less(hard, needs):
        yield problem(
            "open files",
            f"{seen}; the launcher of the first host needs {needs} for {nnodes} hosts",
            raise_it,
        )
    elif _is_less(soft, FEWEST_FILES):
        yield problem("open files", f"{seen}; torchrun needs {FEWEST_FILES}", raise_it)
    elif _is_less(soft, _FILES):
        yield warning("open files", seen, f"{raise_it}; data loaders open many files")
    else:
        yield ok("open files", seen)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _is_less(limit: int, number: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < number


# Devices, and the torch that is to use them


class Torch(NamedTuple):
    """What a child process found when it imported torch. `problem`: why it could not."""

    version: str = ""
    missing: bool = False
    problem: str = ""
    was_started: bool = True  # the child process
    is_late: bool = False  # the problem is that it took too long
    distributed: bool = True
    backends: Sequence[str] = ()
    cuda: str = ""  # that it was built for, "" for a CPU build
    devices: int | None = None  # that CUDA found; None: did not answer
    cuda_problem: str = ""
    nccl: str = ""
    refused: str = ""  # why torchrun would not take the arguments that a user has for it


def read_torch(answer: Answer) -> Torch:
    """Return what doctor_probe.py has printed, a JSON object a line, and how it ended."""
    seen: dict[str, Any] = {}
    for line in answer.out.splitlines():
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            seen.update(said if isinstance(said, dict) else {})
    fields = {name: value for name, value in seen.items() if name in Torch._fields}
    if answer.problem and not seen.get("problem"):
        last = answer.err.strip().rpartition("\n")[2]
        fields.update(
            problem=f"{answer.problem}{last and f' ({last})'}",
            was_started=answer.was_started,
            is_late=answer.is_late,
        )
    return Torch(**fields)


def devices(
    job: PlannedJob, driver: Answer | None, torch: Torch, root: str = ""
) -> Iterator[ReportLine]:
    """Say what the ranks would run on. `driver` is what nvidia-smi has answered, if it is here."""
    gpus = job.cluster.num_gpus
    rows = [line.rpartition(", ") for line in driver.out.splitlines()] if driver else []
    rows = [row for row in rows if row[1]]
    if driver and driver.problem:
        why = (driver.err or driver.out).strip().partition("\n")[0]
        seen = f"nvidia-smi: {driver.problem}{why and f' ({why})'}"
        if gpus or sees_gpu(root):
            yield problem("devices", seen, _REPLACE)
        else:
            to_do = "a job would run on CPU; if this host has GPUs, replace it, or its driver"
            yield warning("devices", f"{seen}; no GPU is seen here", to_do)
    elif not gpus and not rows:
        yield from _without_gpus(job)
    else:
        names = ", ".join(dict.fromkeys(row[0] for row in rows)) or "not listed by nvidia-smi"
        version = f", driver {rows[0][2].strip()}" if rows else ""
        seen = plural(gpus, "MIG slice" if job.cluster.mig else "GPU")
        yield ok("devices", f"{seen} for the job: {names}{version}")
        if gpus:
            yield from _with_gpus(job, torch)


def sees_gpu(root: str = "") -> bool:
    """Tell whether the kernel has an NVIDIA GPU: as a device file, or on its bus."""
    vendors = glob.glob(f"{root}/sys/bus/pci/devices/*/vendor")
    return bool(glob.glob(f"{root}/dev/nvidia[0-9]*")) or any(
        read_text(path).strip() == "0x10de" for path in vendors
    )


def _without_gpus(job: PlannedJob) -> Iterator[ReportLine]:
    cores, neurons = resources.usable_cores(), job.cluster.num_neurons
    if job.plan and job.plan.nproc_per_node == "gpu":
        to_do = f"unset PET_NPROC_PER_NODE, or use {flag('nproc_per_node')}"
        yield problem("devices", "one process per GPU was requested, but this host has none", to_do)
    elif neurons:
        yield ok("devices", f"{plural(neurons, 'Neuron core')}, {plural(cores, 'core')}")
    else:
        yield ok("devices", f"no GPU; {plural(cores, 'core')}")
        if job.ranks > cores:
            seen = f"{job.ranks} processes would share {plural(cores, 'core')}"
            to_do = f"use {flag('nproc_per_node')} {cores}, or a larger instance"
            yield warning("devices", seen, to_do)


def _with_gpus(job: PlannedJob, torch: Torch) -> Iterator[ReportLine]:
    """Find what keeps the ranks from using the GPUs of this host."""
    usable = job.cluster.num_gpus if torch.devices is None else torch.devices
    if torch.version and not torch.cuda:
        seen = f"torch {torch.version} is a CPU build, but this host has GPUs"
        yield problem("devices", seen, "install a CUDA build of torch in the image")
    elif not usable:
        why = f" ({torch.cuda_problem})" if torch.cuda_problem else ""
        yield problem(
            "devices",
            f"torch {torch.version} for CUDA {torch.cuda} cannot use any GPU{why}",
            "use a newer driver (or instance), or a build of torch for an older CUDA",
        )
    elif job.ranks > usable:
        what = plural(usable, "MIG slice" if job.cluster.mig else "GPU")
        seen = f"{job.ranks} processes would share {what}"
        yield warning("devices", seen, f"use {flag('nproc_per_node')} {usable}, or auto")


def torch(job: PlannedJob, torch: Torch) -> Iterator[ReportLine]:
    """Say which torch it is, and which backends it has."""
    if torch.missing:
        if not job.error:  # or else that says so
            yield problem("torch", "torch is not installed", "install torch 2.4 or later")
    elif torch.problem:
        yield from _broken(job, torch)
    elif torch.version and not torch.distributed:
        to_do = "install a build of torch with torch.distributed"
        yield problem("torch", f"torch {torch.version} has no torch.distributed", to_do)
    elif torch.version and _release(torch.version) < _OLDEST_TORCH:
        to_do = "install torch 2.4 or later, with which the launcher is tested"
        yield warning("torch", f"torch {torch.version}", to_do)
    elif torch.version:
        built = f"CUDA {torch.cuda}" if torch.cuda else "CPU"
        nccl = f", NCCL {torch.nccl}" if torch.nccl else ""
        backends = ", ".join(torch.backends) or "none"
        yield ok("torch", f"torch {torch.version} for {built}{nccl}; backends: {backends}")
        if job.cluster.num_gpus and "nccl" not in torch.backends:
            to_do = "install a build of torch with NCCL, or have the script use another backend"
            seen = f"there is no nccl backend, but this host has GPUs; torch has {backends}"
            yield warning("torch", seen, to_do)


def _broken(job: PlannedJob, torch: Torch) -> Iterator[ReportLine]:
    if torch.version:
        how = problem if job.cluster.num_gpus else warning
        seen = f"torch {torch.version}: its backends and devices could not be read: {torch.problem}"
        yield how("torch", seen, _REPLACE)
        return
    seen = f"torch cannot be imported: {torch.problem}"
    if torch.is_late:
        to_do = "run doctor again: the first import can take minutes on a new machine"
        yield warning("torch", seen, to_do)
    elif torch.was_started:
        to_do = "reinstall torch in the image; another module of that name may hide it"
        yield problem("torch", seen, to_do)
    else:
        yield problem(
            "torch", seen, ("allow this user to execute it, and check that more processes may run")
        )


def _release(version: str) -> tuple[int, ...]:
    numbers = version.split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdecimal())
