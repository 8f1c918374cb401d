"""What doctor finds of devices, and of the torch that is to use them."""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from launcher.child import Answer
from launcher.job import resources
from launcher.job.cgroups import read_text
from launcher.text import flag, plural
from launcher_tools.doctor_finding import Finding, ok, problem, warning
from launcher_tools.doctor_job import Job

_OLDEST_TORCH = (2, 4)
_REPLACE = "replace this host, or its driver"


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


def read_torch(answer: Answer | None) -> Torch:
    """Return what doctor_probe.py has printed, a JSON object a line, and how it ended."""
    if answer is None:
        return Torch()
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


def devices(job: Job, driver: Answer | None, torch: Torch, root: str = "") -> Iterator[Finding]:
    """Say what the ranks would run on. `driver` is what nvidia-smi has answered, if it is here."""
    gpus = job.cluster.num_gpus
    rows = [line.rpartition(", ") for line in driver.out.splitlines()] if driver else []
    rows = [row for row in rows if row[1]]
    if driver and driver.problem:
        yield _of_driver(driver, has_gpu=bool(gpus) or sees_gpu(root))
    elif not gpus and not rows:
        yield from _without_gpus(job)
    else:
        names = ", ".join(dict.fromkeys(row[0] for row in rows)) or "not listed by nvidia-smi"
        version = f", driver {rows[0][2].strip()}" if rows else ""
        yield ok("devices", f"{plural(gpus, 'GPU')} for the job: {names}{version}")
        if gpus:
            yield from _with_gpus(job, torch)


def _of_driver(driver: Answer, *, has_gpu: bool) -> Finding:
    why = (driver.err or driver.out).strip().partition("\n")[0]
    seen = f"nvidia-smi: {driver.problem}{why and f' ({why})'}"
    if has_gpu:
        return problem("devices", seen, _REPLACE)
    to_do = "a job would run on CPU; if this host has GPUs, replace it, or its driver"
    return warning("devices", f"{seen}; no GPU is seen here", to_do)


def sees_gpu(root: str = "") -> bool:
    """Tell whether the kernel has an NVIDIA GPU: as a device file, or on its bus."""
    vendors = glob.glob(f"{root}/sys/bus/pci/devices/*/vendor")
    return bool(glob.glob(f"{root}/dev/nvidia[0-9]*")) or any(
        read_text(path).strip() == "0x10de" for path in vendors
    )


def _without_gpus(job: Job) -> Iterator[Finding]:
    cores, neurons = resources.usable_cores(), job.cluster.num_neurons
    if job.plan and job.plan.nproc_per_node == "gpu":
        to_do = f"unset PET_NPROC_PER_NODE, or use {flag('nproc_per_node')}"
        yield problem("devices", "a process for each GPU, but this host has none", to_do)
    elif neurons:
        yield ok("devices", f"{plural(neurons, 'Neuron core')}, {plural(cores, 'core')}")
    else:
        yield ok("devices", f"no GPU; {plural(cores, 'core')}")
        if job.ranks > cores:
            seen = f"{job.ranks} processes would share {plural(cores, 'core')}"
            to_do = f"use {flag('nproc_per_node')} {cores}, or a larger instance"
            yield warning("devices", seen, to_do)


def _with_gpus(job: Job, torch: Torch) -> Iterator[Finding]:
    """Find what keeps the ranks from using the GPUs of this host."""
    usable = job.cluster.num_gpus if torch.devices is None else torch.devices
    if torch.version and not torch.cuda:
        seen = f"torch {torch.version} is a build for CPU, and this host has GPUs"
        yield problem("devices", seen, "install a build of torch for CUDA in the image")
    elif not usable:
        why = f" ({torch.cuda_problem})" if torch.cuda_problem else ""
        yield problem(
            "devices",
            f"torch {torch.version} for CUDA {torch.cuda} can use no GPU{why}",
            "take a newer driver (or instance), or a build of torch for an older CUDA",
        )
    elif job.ranks > usable:
        seen = f"{job.ranks} processes would share {plural(usable, 'GPU')}"
        yield warning("devices", seen, f"use {flag('nproc_per_node')} {usable}, or auto")


def torch(job: Job, torch: Torch) -> Iterator[Finding]:
    """Say which torch it is, and which backends it has."""
    if torch.missing:
        if not job.error:  # or else that says so
            yield problem("torch", "torch is not installed", "install torch 2.4 or later")
    elif torch.problem:
        yield _broken(job, torch)
    elif torch.version and not torch.distributed:
        to_do = "install a build of torch with torch.distributed"
        yield problem("torch", f"torch {torch.version} has no torch.distributed", to_do)
    elif torch.version and _release(torch.version) < _OLDEST_TORCH:
        to_do = "install torch 2.4 or later, which the launcher was tried with"
        yield warning("torch", f"torch {torch.version}", to_do)
    elif torch.version:
        built = f"CUDA {torch.cuda}" if torch.cuda else "CPU"
        nccl = f", NCCL {torch.nccl}" if torch.nccl else ""
        yield ok("torch", f"torch {torch.version} for {built}{nccl}")
        yield _backends(job, torch)


def _broken(job: Job, torch: Torch) -> Finding:
    if torch.version:
        seen = f"torch {torch.version}, asked for its backends and devices: {torch.problem}"
        return (problem if job.cluster.num_gpus else warning)("torch", seen, _REPLACE)
    seen = f"torch cannot be imported: {torch.problem}"
    if torch.is_late:
        to_do = "run it again: the first import can take minutes on a new machine"
        return warning("torch", seen, to_do)
    to_do = "install torch anew in the image; a module of that name may hide it"
    if not torch.was_started:
        to_do = "let this user execute it, and see that more processes may run"
    return problem("torch", seen, to_do)


def _backends(job: Job, torch: Torch) -> Finding:
    shown, has_gpus = ", ".join(torch.backends) or "none", job.cluster.num_gpus
    if has_gpus and "nccl" not in torch.backends:
        to_do = "install a build of torch with NCCL, or have the script use another backend"
        seen = f"no nccl, and this host has GPUs; torch has {shown}"
        return warning("backends", seen, to_do)
    hint = "; nccl needs GPUs" if "nccl" in torch.backends and not has_gpus else ""
    return ok("backends", shown + hint)


def _release(version: str) -> tuple[int, ...]:
    numbers = version.split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdecimal())
