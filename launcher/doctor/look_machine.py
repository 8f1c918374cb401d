"""Memory, folders and limits of this host, versions, and what is above this process."""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping

from launcher import __version__
from launcher.doctor.facts import LOG_DIR, Folder, Limit, MachineFacts, StopFacts, Versions
from launcher.errors import LaunchError
from launcher.job import cgroups, resources, toolkit
from launcher.job.cgroups import read_text
from launcher.job.options import INIT
from launcher.processes import status
from launcher.result.failure import output_dir
from launcher.run_dir import run_dir, unpacked

_MOST_ANCESTORS = 50
_SHM = "/dev/shm"


def look_at_machine(
    environ: Mapping[str, str], log_dir: str, *, on_sagemaker: bool, root: str = ""
) -> MachineFacts:
    """Return what is known of this machine; `root` is in front of /proc and /sys, for tests."""
    memory, memory_of = _memory(root)
    return MachineFacts(
        cores=resources.usable_cores(),
        shm=_shm(),
        folders=tuple(_folders(environ, log_dir, on_sagemaker=on_sagemaker)),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_processes(root),
        memory=memory,
        memory_of=memory_of,
    )


def _limit(which: int) -> tuple[int | None, int | None]:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which)
    )
    return soft, hard


def _shm() -> Limit:
    try:
        seen = os.statvfs(_SHM)
    except OSError:
        return Limit(0)
    if not os.access(_SHM, os.W_OK):
        return Limit(0)
    size = seen.f_frsize
    return Limit(seen.f_blocks * size, (seen.f_blocks - seen.f_bavail) * size)


def _folders(environ: Mapping[str, str], log_dir: str, *, on_sagemaker: bool) -> Iterator[Folder]:
    base = toolkit.base_dir(environ)
    if on_sagemaker:
        model = environ.get("SM_MODEL_DIR") or os.path.join(base, "model")
        yield _folder(model, "the model")
        yield _folder(output_dir(environ), "the failure reason")
    checkpoints = os.path.join(base, "checkpoints")
    if os.path.isdir(checkpoints):
        yield _folder(checkpoints, "checkpoints")
    if log_dir:
        there = os.path.abspath(log_dir)
        while not os.path.exists(there) and os.path.dirname(there) != there:
            there = os.path.dirname(there)  # the launcher makes the rest
        if os.path.isdir(there):
            yield _folder(there, LOG_DIR)
        else:
            yield Folder(there, LOG_DIR, "it is not a folder")
    temporary = environ.get("TMPDIR") or "/tmp"
    try:
        with run_dir(environ) as folder:
            unpacked((), folder)
            yield _folder(temporary, "TMPDIR")
    except LaunchError as error:
        yield Folder(temporary, "TMPDIR", str(error).rstrip("."))


def _folder(path: str, use: str) -> Folder:
    try:
        seen = os.statvfs(path)
    except OSError as error:
        return Folder(path, use, f"{error.strerror}")
    if not os.access(path, os.W_OK | os.X_OK):
        return Folder(path, use, "this user may not write to it")
    full = seen.f_files > 0 and seen.f_favail == 0
    return Folder(path, use, free=seen.f_bavail * seen.f_frsize, no_inodes=full)


def _processes(root: str) -> Limit:
    """Return the tightest limit on processes and threads."""
    limits = []
    for folder in cgroups.folders("pids", root):
        most, used = _number(f"{folder}/pids.max"), _number(f"{folder}/pids.current")
        if most is not None:
            limits.append(Limit(most, used))
    soft, _ = _limit(resource.RLIMIT_NPROC)
    if soft is not None and os.geteuid() != 0:  # root has none
        limits.append(Limit(soft, _own_threads()))
    return min(limits, key=_free, default=Limit())


def _own_threads() -> int:
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


def _memory(root: str) -> tuple[Limit, str]:
    """Return the memory that a job has, and whose it is: a cgroup's or the machine's."""
    fields = {}
    for line in read_text(f"{root}/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.split()[:1] and value.split()[0].isdecimal():
            fields[name] = int(value.split()[0]) << 10
    found = []
    if "MemTotal" in fields:
        most = fields["MemTotal"]
        found.append((Limit(most, most - fields.get("MemAvailable", most)), "this machine"))
    for folder in cgroups.folders("memory", root):
        limit = _number(f"{folder}/memory.max", f"{folder}/memory.limit_in_bytes")
        used = _number(f"{folder}/memory.current", f"{folder}/memory.usage_in_bytes") or 0
        if limit is not None and limit < 1 << 60:  # v1 writes about 2**63 for no limit
            found.append((Limit(limit, max(0, used - _cache(folder))), "the memory cgroup"))
    return min(found, key=lambda one: _free(one[0]), default=(Limit(), ""))


def _cache(folder: str) -> int:
    """Return the bytes of files that a memory cgroup would give back."""
    for line in read_text(f"{folder}/memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            return int(value)
    return 0


def _number(*paths: str) -> int | None:
    for path in paths:
        text = read_text(path).strip()
        if text.isdecimal():
            return int(text)
    return None


def _free(limit: Limit) -> int:
    return (limit.most or 0) - (limit.used or 0)


def sees_gpu(root: str = "") -> bool:
    """Tell whether the kernel has an NVIDIA GPU: as a device file, or on its bus."""
    vendors = glob.glob(f"{root}/sys/bus/pci/devices/*/vendor")
    return bool(glob.glob(f"{root}/dev/nvidia[0-9]*")) or any(
        read_text(path).strip() == "0x10de" for path in vendors
    )


def look_above(environ: Mapping[str, str]) -> StopFacts:
    """Return what a stop has to pass on its way to this process."""
    return StopFacts(
        own_pid=os.getpid(),
        pid_1=_arguments(1),
        ancestors=tuple(_ancestors()),
        init_answers=_init_answers(environ.get(INIT, "")),
    )


def _ancestors() -> Iterator[tuple[int, tuple[str, ...]]]:
    pid = os.getppid()
    with contextlib.suppress(OSError, KeyError, ValueError):
        for _ in range(_MOST_ANCESTORS):
            if pid < 1:
                return
            yield pid, _arguments(pid)
            pid = int(status(pid)[b"PPid"])


def _arguments(pid: int) -> tuple[str, ...]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(1 << 16).rstrip(b"\0").split(b"\0")
    except OSError:
        return ()
    return tuple(os.fsdecode(word) for word in words) if words != [b""] else ()


def _init_answers(name: str) -> bool:
    if not name:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect("\0" + name)
        except OSError:
            return False  # the variable has outlived its init
    return True


def look_at_versions() -> Versions:
    """Return the versions of what is installed beside torch."""
    from importlib import metadata

    found = {}
    for name in ("psutil", "sagemaker-training"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return Versions(
        launcher=__version__,
        python=".".join(map(str, sys.version_info[:3])),
        psutil=found.get("psutil", ""),
        toolkit=found.get("sagemaker-training", ""),
    )
