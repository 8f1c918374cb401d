"""Facts of this machine in, findings out: memory, disk, limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.text import flag, plural
from launcher_tools.doctor_facts import LOG_DIR, Facts, Folder, Limit
from launcher_tools.doctor_finding import Finding, ok, problem, size, warning

_SMALL_SHM = 512 << 20  # bytes; Docker's default is 64 MiB
_LITTLE_DISK = 1 << 30
_MEMORY = 512 << 20  # bytes that a rank needs, to import torch and a little more
_DESCRIPTORS = 30  # that the first launcher needs besides one for each host
_FILES = 1024
_FEWEST_FILES = 26  # torchrun and its store: seen to fail with 25 (torch 2.13)
_PROCESSES = 100  # processes and threads of a rank: OpenMP, data loaders, NCCL


def judge(facts: Facts) -> list[Finding]:
    """Return what is found of this machine."""
    return [
        _versions(facts),
        *(_late() if "machine" in facts.late else _limits(facts)),
    ]


def _late() -> list[Finding]:
    seen = "folders and limits could not be read in time: a file system hangs"
    return [warning("disk", seen, "look at what is mounted here (FSx, EFS, S3)")]


def _limits(facts: Facts) -> list[Finding]:
    return [
        *_memory(facts),
        *_shm(facts.machine.shm),
        *_disk(facts.machine.folders),
        _files(facts),
        _processes(facts),
    ]


def _versions(facts: Facts) -> Finding:
    seen = facts.versions
    toolkit = f"sagemaker-training {seen.toolkit}" if seen.toolkit else "no sagemaker-training"
    psutil = f"psutil {seen.psutil}" if seen.psutil else "no psutil"
    return ok("versions", f"launcher {seen.launcher}, Python {seen.python}, {psutil}, {toolkit}")


def _memory(facts: Facts) -> list[Finding]:
    memory, processes = facts.machine.memory, facts.job.processes
    if memory.most is None:
        return []
    free = memory.most - (memory.used or 0)
    seen = f"{size(free)} of {size(memory.most)} free ({facts.machine.memory_of})"
    if free < processes * _MEMORY:
        seen += f", for {plural(processes, 'rank')}"
        return [warning("memory", seen, "use fewer processes, a larger instance, or docker run -m")]
    return [ok("memory", seen)]


def _shm(shm: Limit) -> list[Finding]:
    to_do = "start the container with --shm-size=2g or more (SageMaker does)"
    uses = "data loaders' workers and NCCL pass data through it"
    if shm.most is None:
        return []
    if not shm.most:
        return [warning("/dev/shm", f"it is missing or read-only; {uses}", to_do)]
    free = shm.most - (shm.used or 0)
    seen = f"{size(free)} of {size(shm.most)} free"
    if free < _SMALL_SHM:
        return [warning("/dev/shm", f"{seen}; {uses}", to_do)]
    return [ok("/dev/shm", seen)]


def _disk(folders: Sequence[Folder]) -> list[Finding]:
    """Find each folder that is of no use; the others of one disk are one line."""
    found = []
    fine: dict[str, list[str]] = {}
    for folder in folders:
        where = f"{folder.path} ({folder.use})"
        if folder.problem:
            # Of TMPDIR the launcher's own message says what to do.
            if folder.use == "TMPDIR":
                found.append(problem("disk", f"{where}: {folder.problem}", ""))
            elif folder.use == LOG_DIR:
                to_do = "name a folder that this user may write to"
                found.append(problem("disk", f"{where}: {folder.problem}", to_do))
            else:
                to_do = "make it, or make it writable for this user"
                found.append(warning("disk", f"{where}: {folder.problem}", to_do))
        elif folder.no_inodes or (folder.free is not None and folder.free < _LITTLE_DISK):
            left = "no files" if folder.no_inodes else size(folder.free or 0)
            found.append(
                warning(
                    "disk",
                    f"{where}: {left} left",
                    "raise volume_size of the estimator, or remove files",
                )
            )
        elif folder.free is not None:
            fine.setdefault(size(folder.free), []).append(where)
    return [*found, *(ok("disk", f"{free} free: {', '.join(fine[free])}") for free in fine)]


def _files(facts: Facts) -> Finding:
    job, (soft, hard) = facts.job, facts.machine.open_files
    needs = job.nnodes + _DESCRIPTORS
    shown = " ".join("unlimited" if limit is None else str(limit) for limit in (soft, hard))
    seen = f"{shown} (soft, hard)".replace(" ", ", ", 1)
    if job.peers and job.nnodes > 1 and job.is_first and hard is not None and hard < needs:
        return problem(
            "open files",
            f"{seen}; the launcher of the first host needs {needs} for {job.nnodes} hosts",
            f"start the container with --ulimit nofile={max(needs, 65536)}, "
            f"or use {flag('peers')} false",
        )
    if soft is not None and soft < _FEWEST_FILES:
        to_do = "start the container with --ulimit nofile=65536"
        return problem("open files", f"{seen}; torchrun needs {_FEWEST_FILES}", to_do)
    if soft is not None and soft < _FILES:
        to_do = "start the container with --ulimit nofile=65536: data loaders open many files"
        return warning("open files", seen, to_do)
    return ok("open files", seen)


def _processes(facts: Facts) -> Finding:
    limit, ranks = facts.machine.processes, facts.job.processes
    if limit.most is None:
        return ok("processes", "no limit")
    free = limit.most - (limit.used or 0)
    seen = f"this user may have {limit.most} processes and threads"
    if limit.used is not None:
        seen = f"{free} more processes and threads may run, of {limit.most}"
    # torchrun, the launcher, and a few threads of torch in each rank.
    if free < 10 + 4 * ranks:
        to_do = "start the container with --pids-limit=-1, or --ulimit nproc=-1"
        return problem("processes", f"{seen}, too few for {plural(ranks, 'rank')}", to_do)
    if free < _PROCESSES * (1 + ranks):
        to_do = "start the container with --pids-limit=-1, or --ulimit nproc=-1"
        return warning("processes", f"{seen}, for {plural(ranks, 'rank')}", to_do)
    return ok("processes", seen)
