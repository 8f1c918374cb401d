"""In a rank and its keeper: find the resource whose shortage may have caused an error.

A full disk, little shared memory, a limit on processes and a missing network interface are frequent
causes of errors that seldom name them. They are read at the error: later, nobody could tell.

describe.py loads this in the script's process, at its exception; keeper.py imports it after a death
by a signal. It imports no module of ours, and calls none of the script's code.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import socket

TYPE_CHECKING = False  # typing takes 2 ms
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

# Messages of errors that each shortage may cause: of Python, torch, NumPy, SQLite, Rust and NCCL.
_SPACE = (
    r"No space left on device|Disk quota exceeded|os error (?:28|122)\b|(?:disk|device) is full"
    r"|unexpected pos \d+ vs \d+|PytorchStreamWriter|file write failed|iostream error"
    r"|\d+ requested and \d+ written|[Nn]ot enough (?:free |disk )+space"
)
_SHARED_MEMORY = (
    r"shared memory(?:\.| ?\(shm\)| (?:segment|object|limit|file))|</torch_|/dev/shm/nccl"
    r"|signal: Bus error|\bSIGBUS\b"
)
_PROCESSES = r"can't start new thread|Resource temporarily unavailable|pthread_create"
_INTERFACES = {
    "GLOO_SOCKET_IFNAME": r"Unable to find (?:address|interface) for\b",
    "NCCL_SOCKET_IFNAME": r"\bno (?:usable )?(?:listening |socket )?interfaces? found",
}
_OF_SPACE = {errno.ENOSPC, errno.EDQUOT}
_PATH = r"""['"<](/[^'"<>\n]+)['">]"""
_SHM = "/dev/shm"
_LITTLE = 1 << 30  # bytes: so little may fill up and be free again within a moment
# Volumes whose server may not answer.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "9p", "autofs", "afs", "beegfs")
_LONGEST_PATH = 1024


def behind(text: str, errors: Sequence[BaseException] = ()) -> list[str]:
    """Return the shortages that may have caused an error, in words.

    `text` is that of the exceptions `errors`, the last output of a dead process, or its signal's
    name.
    """
    system = [error for error in errors if isinstance(error, OSError)]
    numbers = {error.errno for error in system}
    found: list[str] = []
    if re.search(_SHARED_MEMORY, text):
        found += _of_shared_memory(text)
    elif numbers & _OF_SPACE or re.search(_SPACE, text):
        found += _of_space(text, [error for error in system if error.errno in _OF_SPACE], errors)
    elif errno.ENOMEM in numbers:
        found += _full([_SHM])
    if numbers & {errno.EAGAIN, errno.ENOMEM} or re.search(_PROCESSES, text):
        found += _of_processes()
    for variable, says in _INTERFACES.items():
        if re.search(says, text):
            there = ", ".join(name for _, name in socket.if_nameindex())
            value = os.environ.get(variable)
            wanted = f"{variable} is {value!r}, and " if value else ""
            found.append(f"{wanted}this host's interfaces are {there}")
    return found


def _of_shared_memory(text: str) -> list[str]:
    """Return that shared memory is full, or small: its user may have freed it already."""
    is_bus_error = re.search("SIGBUS|Bus error", text)  # a mapped file can cause it, too
    found = _full([_SHM, *_mounts()] if is_bus_error else [_SHM])
    if found or "Too many open files" in text:
        return found
    volume = os.statvfs(_SHM)
    size = volume.f_blocks * volume.f_frsize
    return [f"{_SHM} has only {_bytes(size)}"] if size < _LITTLE else []


def _of_space(text: str, failed: list[OSError], errors: Sequence[BaseException]) -> list[str]:
    """Return which volume is full, nearly full, or over its quota.

    It is the volume of the `failed` calls' paths; without paths, that of a path in the exceptions'
    frames or in the text; otherwise any full volume.
    """
    names = [name for error in failed for name in (error.filename, error.filename2)]
    own = [name for name in names if isinstance(name, str)]
    likely = own or [*_paths_of(errors), *re.findall(_PATH, text)]
    if found := _full(likely) or ([] if own else _full(_mounts())):
        return found
    if likely and re.search(r"Disk quota exceeded|os error 122\b", text):
        return [f"the disk quota on {_mount(likely[0])} is used up"]
    return _full(likely, _LITTLE)


def _full(paths: Iterable[str], little: int = 0) -> list[str]:
    """Return the first volume of these paths that is full, if any.

    If `little` is not 0, a volume with fewer free bytes, or less than a tenth free, counts, too.
    """
    for folder in dict.fromkeys(map(_folder, paths)):
        try:
            volume = os.statvfs(folder)
        except OSError:
            continue
        free, size = volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize
        if volume.f_flag & os.ST_RDONLY or not size:
            continue
        # File systems may reserve some space for themselves.
        if free <= max(1 << 16, min(size // 100, 1 << 26)):
            return [f"{_mount(folder)} is full ({_bytes(free)} of {_bytes(size)} free)"]
        if volume.f_files and volume.f_favail <= volume.f_files // 1000:
            counts = f"{volume.f_favail:,} of {volume.f_files:,}"
            return [f"{_mount(folder)} is full ({counts} inodes free)"]
        if little and free < max(little, size // 10):
            return [f"{_mount(folder)} has only {_bytes(free)} of {_bytes(size)} free"]
    return []


def _of_processes() -> list[str]:
    """Return that this user has about as many processes and threads as ulimit -u allows."""
    most, user = resource.getrlimit(resource.RLIMIT_NPROC)[0], os.getuid()
    if most == resource.RLIM_INFINITY or not user:  # root is not limited
        return []
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    used = f"user {user} runs {count:,} of {most:,} processes and threads (ulimit -u)"
    return [used] if count >= most * 0.9 else []


def _paths_of(errors: Iterable[BaseException]) -> list[str]:
    """Return paths of open files, and path-like texts, in exceptions' frames, innermost first.

    The files of a frame come before its texts.
    """
    found: list[object] = []
    for error in errors:
        frames = []
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            frames.append(list(trace.tb_frame.f_locals.values()))
            trace = trace.tb_next
        for values in reversed(frames):
            found += [*map(_name_of_file, values), *values]
    return [value for value in found if type(value) is str and _is_path(value)]


def _name_of_file(value: object) -> object:
    kind = type(value)  # isinstance() may call a proxy's own code
    if issubclass(kind, io.IOBase) or kind.__module__ == "tempfile":
        return getattr(value, "name", None)
    return str(value) if str(kind.__module__).startswith("pathlib") else None


def _is_path(value: str) -> bool:
    """Tell whether a text may be a path; the file need not exist."""
    if not 0 < len(value) <= _LONGEST_PATH or "\0" in value:
        return False
    return os.path.lexists(value) or (os.sep in value and os.path.isdir(os.path.dirname(value)))


def _mounts() -> Iterator[str]:
    """Yield the mount points of this machine's own volumes (proc(5), mountinfo)."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, kind = line.partition(" - ")
            if not kind.startswith(_REMOTE):
                path = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
                if os.path.isdir(path):
                    yield path


def _mount(path: str) -> str:
    """Return the mount point of a path's volume."""
    path = os.path.realpath(_folder(path))
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _folder(path: str) -> str:
    """Return the nearest existing folder at or above a path."""
    path = os.path.abspath(path)
    while not os.path.isdir(path) and path != os.sep:
        path = os.path.dirname(path)
    return path


def _bytes(count: float) -> str:
    """Return a number of bytes for people: 0, 12 KiB, 1.5 GiB."""
    if not count:
        return "0"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            break
        count, unit = count / 1024, "TiB"
    return f"{f'{count:.1f}'.removesuffix('.0') if count < 10 else f'{count:.0f}'} {unit}"
