"""Facts of devices and torch in, findings out. Pure."""

from __future__ import annotations

from launcher.text import flag, plural
from launcher_tools.doctor_facts import Facts, TorchFacts
from launcher_tools.doctor_finding import Finding, ok, problem, warning

_OLDEST_TORCH = (2, 4)


def judge(facts: Facts) -> list[Finding]:
    """Return what is found of GPUs and the like, and of the torch that is to use them."""
    return [*_devices(facts), *_torch(facts)]


def _devices(facts: Facts) -> list[Finding]:
    job, seen, torch = facts.job, facts.devices, facts.torch
    if seen.problem and (job.num_gpus or seen.is_seen):
        return [problem("devices", seen.problem, "replace this host, or its driver")]
    if seen.problem:
        to_do = "a job would run on CPU; if this host has GPUs, replace it, or its driver"
        return [warning("devices", f"{seen.problem}; no GPU is seen here", to_do)]
    if not (job.num_gpus or seen.gpus):
        if job.nproc_per_node == "gpu":
            to_do = f"unset PET_NPROC_PER_NODE, or use {flag('nproc_per_node')}"
            return [problem("devices", "a process for each GPU, but this host has none", to_do)]
        cores = plural(facts.machine.cores, "core")
        if job.num_neurons:
            return [ok("devices", f"{plural(job.num_neurons, 'Neuron core')}, {cores}")]
        return [ok("devices", f"no GPU; {cores}"), *_crowded(facts)]
    names = ", ".join(dict.fromkeys(seen.gpus)) or "not listed by nvidia-smi"
    driver = f", driver {seen.driver}" if seen.driver else ""
    found = [ok("devices", f"{plural(job.num_gpus, 'GPU')} for the job: {names}{driver}")]
    if job.num_gpus and torch.version and not torch.cuda:
        return [
            *found,
            problem(
                "devices",
                f"torch {torch.version} is a build for CPU, and this host has GPUs",
                "install a build of torch for CUDA in the image",
            ),
        ]
    if job.num_gpus and torch.devices == 0:
        why = f" ({torch.cuda_problem})" if torch.cuda_problem else ""
        return [
            *found,
            problem(
                "devices",
                f"torch {torch.version} for CUDA {torch.cuda} can use no GPU{why}",
                "take a newer driver (or instance), or a build of torch for an older CUDA",
            ),
        ]
    usable = job.num_gpus if torch.devices is None else torch.devices
    if job.num_gpus and job.processes > usable:
        found.append(
            warning(
                "devices",
                f"{job.processes} processes would share {plural(usable, 'GPU')}",
                f"use {flag('nproc_per_node')} {usable}, or auto",
            )
        )
    return found


def _crowded(facts: Facts) -> list[Finding]:
    processes, cores = facts.job.processes, facts.machine.cores
    if processes <= cores:
        return []
    return [
        warning(
            "devices",
            f"{processes} processes would share {plural(cores, 'core')}",
            f"use {flag('nproc_per_node')} {cores}, or a larger instance",
        )
    ]


def _torch(facts: Facts) -> list[Finding]:
    torch = facts.torch
    if torch.missing:
        if facts.job.error:
            return []  # says so
        return [problem("torch", "torch is not installed", "install torch 2.4 or later")]
    if torch.problem:
        if torch.version:
            seen = f"torch {torch.version}, asked for its backends and devices: {torch.problem}"
            judged = problem if facts.job.num_gpus else warning
            return [judged("torch", seen, "replace this host, or its driver")]
        seen = f"torch cannot be imported: {torch.problem}"
        if torch.is_late:
            to_do = "run it again: the first import can take minutes on a new machine"
            return [warning("torch", seen, to_do)]
        if not torch.was_started:
            to_do = "let this user execute it, and see that more processes may run"
            return [problem("torch", seen, to_do)]
        to_do = "install torch anew in the image; a module of that name may hide it"
        return [problem("torch", seen, to_do)]
    if not torch.version:
        return []
    if not torch.distributed:
        to_do = "install a build of torch with torch.distributed"
        return [problem("torch", f"torch {torch.version} has no torch.distributed", to_do)]
    if _release(torch.version) < _OLDEST_TORCH:
        to_do = "install torch 2.4 or later, which the launcher was tried with"
        return [warning("torch", f"torch {torch.version}", to_do)]
    return [ok("torch", f"torch {torch.version}{_built(torch)}"), *_backends(facts)]


def _built(torch: TorchFacts) -> str:
    cuda = f" for CUDA {torch.cuda}" if torch.cuda else " for CPU"
    return cuda + (f", NCCL {torch.nccl}" if torch.nccl else "")


def _backends(facts: Facts) -> list[Finding]:
    have = facts.torch.backends
    shown = ", ".join(have) or "none"
    if facts.job.num_gpus and "nccl" not in have:
        to_do = "install a build of torch with NCCL, or have the script use another backend"
        return [warning("backends", f"no nccl, and this host has GPUs; torch has {shown}", to_do)]
    hint = "; nccl needs GPUs" if "nccl" in have and not facts.job.num_gpus else ""
    return [ok("backends", shown + hint)]


def _release(version: str) -> tuple[int, ...]:
    numbers = version.split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdecimal())
