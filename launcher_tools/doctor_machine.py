"""What doctor finds of this machine: versions, memory, folders, limits.

`root` is in front of /proc, /sys and /dev, for tests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Iterator, Mapping

from launcher import __version__
from launcher.errors import LaunchError
from launcher.job import cgroups, toolkit
from launcher.job.cgroups import read_text
from launcher.processes import status
from launcher.result.failure import output_dir
from launcher.run_dir import run_dir, unpacked
from launcher.text import flag, plural
from launcher_tools.doctor_finding import Finding, ok, problem, size, warning
from launcher_tools.doctor_job import Job, installed

_SMALL_SHM = 512 << 20  # bytes; Docker's default is 64 MiB
_LITTLE_DISK = 1 << 30
_MEMORY = 512 << 20  # bytes that a rank needs, to import torch and a little more
_DESCRIPTORS = 30  # that the first launcher needs besides one for each host
_FILES = 1024
_FEWEST_FILES = 26  # torchrun and its store: seen to fail with 25 (torch 2.13)
_PROCESSES = 100  # processes and threads of a rank: OpenMP, data loaders, NCCL
_FOLDERS = {  # what is to be done if one cannot be written to, by what it is for
    flag("log_dir"): (problem, "name a folder that this user may write to"),
    "TMPDIR": (problem, ""),  # the launcher's own message says it
}


def check(job: Job, environ: Mapping[str, str]) -> list[Finding]:
    """Return what is found of memory, folders and limits. A file system may hang for ever."""
    return [
        *memory(job.ranks),
        *shm(),
        *disk(environ, job.options.log_dir),
        *open_files(job),
        *processes(job.ranks),
    ]


def versions() -> Iterator[Finding]:
    """Say which versions of the launcher and of what it needs there are."""
    python = ".".join(map(str, sys.version_info[:3]))
    others = []
    for name in ("psutil", "sagemaker-training"):
        version = installed(name)
        others.append(f"{name} {version}" if version else f"no {name}")
    yield ok("versions", f"launcher {__version__}, Python {python}, {', '.join(others)}")


def memory(ranks: int, root: str = "") -> Iterator[Finding]:
    """Say how much memory a job has: the cgroup's or the machine's, whichever has less."""
    found = []
    fields = _fields(f"{root}/proc/meminfo")
    if "MemTotal:" in fields:
        most = fields["MemTotal:"]
        free = fields.get("MemAvailable:", most)  # which Linux has since 3.14
        found.append((free << 10, most << 10, "this machine"))
    for folder in cgroups.folders("memory", root):
        limit = _number(f"{folder}/memory.max", f"{folder}/memory.limit_in_bytes")
        used = _number(f"{folder}/memory.current", f"{folder}/memory.usage_in_bytes") or 0
        if limit is not None and limit < 1 << 60:  # v1 writes about 2**63 for no limit
            stat = _fields(f"{folder}/memory.stat")
            # Files that the cgroup would give back.
            cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            found.append((limit - max(0, used - cache), limit, "the memory cgroup"))
    if found:
        free, most, whose = min(found, key=lambda one: one[0])
        seen = f"{size(free)} of {size(most)} free ({whose})"
        if free < ranks * _MEMORY:
            seen += f", for {plural(ranks, 'rank')}"
            to_do = "use fewer processes, a larger instance, or docker run -m"
            yield warning("memory", seen, to_do)
        else:
            yield ok("memory", seen)


def _fields(path: str) -> dict[str, int]:
    """Return the numbers of a file with lines of a name and a number, by the names."""
    lines = (line.split() for line in read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if words[1:] and words[1].isdecimal()}


def _number(*paths: str) -> int | None:
    for path in paths:
        text = read_text(path).strip()
        if text.isdecimal():
            return int(text)
    return None


def shm(root: str = "") -> Iterator[Finding]:
    """Say how large /dev/shm is."""
    to_do = "start the container with --shm-size=2g or more (SageMaker does)"
    uses = "data loaders' workers and NCCL pass data through it"
    try:
        seen = _writable(f"{root}/dev/shm")
    except OSError:
        yield warning("/dev/shm", f"it is missing or read-only; {uses}", to_do)
        return
    free = seen.f_bavail * seen.f_frsize
    shown = f"{size(free)} of {size(seen.f_blocks * seen.f_frsize)} free"
    if free < _SMALL_SHM:
        yield warning("/dev/shm", f"{shown}; {uses}", to_do)
    else:
        yield ok("/dev/shm", shown)


def disk(environ: Mapping[str, str], log_dir: str = "") -> Iterator[Finding]:
    """Find each folder that is of no use; the others of one disk are one line."""
    fine: dict[str, list[str]] = {}
    for path, use in _folders(environ, log_dir):
        where = f"{path} ({use})"
        how, to_do = _FOLDERS.get(use, (warning, "make it, or make it writable for this user"))
        try:
            if use == "TMPDIR":  # where a job makes a folder, and may unpack files
                with run_dir(environ) as folder:
                    unpacked((), folder)
            seen = _writable(path)
        except (OSError, LaunchError) as error:
            why = str(getattr(error, "strerror", error)).rstrip(".")
            yield how("disk", f"{where}: {why}", to_do)
            continue
        free, has_no_inodes = seen.f_bavail * seen.f_frsize, seen.f_files and not seen.f_favail
        if has_no_inodes or free < _LITTLE_DISK:
            left = "no files" if has_no_inodes else size(free)
            to_do = "raise volume_size of the estimator, or remove files"
            yield warning("disk", f"{where}: {left} left", to_do)
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


def _writable(folder: str) -> os.statvfs_result:
    """Return what is left in a folder. Raises OSError if nothing can be made there."""
    seen = os.statvfs(folder)
    if not os.path.isdir(folder):
        raise OSError(errno.ENOTDIR, "it is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "this user may not write to it")
    return seen


def open_files(job: Job) -> Iterator[Finding]:
    """Say how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    nnodes = job.cluster.nnodes
    needs = nnodes + _DESCRIPTORS
    seen = f"{_limit(soft)}, {_limit(hard)} (soft, hard)"
    raise_it = f"start the container with --ulimit nofile={max(needs, 65536)}"
    if job.options.peers and nnodes > 1 and job.is_first and _is_less(hard, needs):
        yield problem(
            "open files",
            f"{seen}; the launcher of the first host needs {needs} for {nnodes} hosts",
            f"{raise_it}, or use {flag('peers')} false",
        )
    elif _is_less(soft, _FEWEST_FILES):
        yield problem("open files", f"{seen}; torchrun needs {_FEWEST_FILES}", raise_it)
    elif _is_less(soft, _FILES):
        yield warning("open files", seen, f"{raise_it}: data loaders open many files")
    else:
        yield ok("open files", seen)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _is_less(limit: int, number: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < number


def processes(ranks: int, root: str = "") -> Iterator[Finding]:
    """Say how many more processes and threads may run, by the tightest limit."""
    limits = []
    for folder in cgroups.folders("pids", root):
        most = _number(f"{folder}/pids.max")
        if most is not None:
            limits.append((most - (_number(f"{folder}/pids.current") or 0), most))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root has none
        limits.append((soft - own_threads(), soft))
    if not limits:
        yield ok("processes", "no limit")
        return
    free, most = min(limits)
    seen = f"{free} more processes and threads may run, of {most}"
    to_do = "start the container with --pids-limit=-1, or --ulimit nproc=-1"
    # torchrun, the launcher, and a few threads of torch in each rank.
    if free < 10 + 4 * ranks:
        yield problem("processes", f"{seen}, too few for {plural(ranks, 'rank')}", to_do)
    elif free < _PROCESSES * (1 + ranks):
        yield warning("processes", f"{seen}, for {plural(ranks, 'rank')}", to_do)
    else:
        yield ok("processes", seen)


def own_threads() -> int:
    """Return how many threads this user has beside doctor's, as far as they can be seen."""
    uid, found = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, KeyError):
                fields = status(int(name))
                is_ours = os.getpid() in (int(name), int(fields[b"PPid"]))
                if int(fields[b"Uid"].split()[0]) == uid and not is_ours:
                    found += int(fields[b"Threads"])
    return found
