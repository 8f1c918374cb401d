"""The folders on this host of a job that runs: one for each attempt, and one for the nursery."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence

from launcher.errors import LaunchError
from launcher.host.archive import ARCHIVE, PACKAGE, read
from launcher.text.log import log

# What torchrun and the ranks execute.
_IN_CHILDREN = ("agent.py", "nursery.py", "rank.py", "describe.py", "unseen.py", "copier.py")
_EXECUTED = [os.path.join(PACKAGE, "run", name) for name in _IN_CHILDREN]
PREFIX, SOCKET = "sm-launch-", "socket"  # of its name; of its socket's
_CRASH_BYTES = 1 << 16  # the end of what a rank has written that crashed
_PARENT_BYTES = 60  # of the path of the folder above: a socket's has at most 107 (unix(7))
IN_RANK = os.path.join(PACKAGE, "watch", "in_rank.py")


@contextlib.contextmanager
def run_dir(environ: Mapping[str, str]) -> Iterator[str]:
    """Make a folder for the launcher's socket and torchrun's temporary files; remove it after.

    Raises LaunchError.
    """
    parent = _parent(environ)
    length, too_long = len(os.fsencode(parent)), ""
    if length > _PARENT_BYTES:
        parent = "/tmp"
        expected = f"expected at most {_PARENT_BYTES}"
        too_long = f"TMPDIR is too long for a socket in it ({length} bytes; {expected})"
        log(f"{too_long}: {parent} is used instead.")
    folder = os.path.join(parent, f"{_prefix(os.getpid())}{time.time_ns():x}")
    try:
        os.mkdir(folder, 0o700)  # only if it is not there
    except OSError as error:
        what = f"cannot create a folder in {parent} ({error.strerror})"
        fix = f"set TMPDIR to a writable folder whose path has at most {_PARENT_BYTES} bytes"
        raise LaunchError(f"{too_long and too_long + '; '}{what}; {fix}.") from None
    try:
        yield folder
    finally:
        _remove(folder)


def unpacked(argv: Sequence[str], folder: str) -> Sequence[str]:
    """Return a command whose files can be executed: copies in that folder of an archive's.

    Raises LaunchError.
    """
    if not ARCHIVE:
        return argv
    folder = os.path.abspath(folder)  # as agent.py calls it: TMPDIR may be ./a//b
    copies = {path: os.path.join(folder, os.path.basename(path)) for path in (*_EXECUTED, IN_RANK)}
    try:
        for path, copy in copies.items():
            if not os.path.exists(copy):  # or an attempt before has it there
                with open(copy, "xb") as file:
                    file.write(read(path))
    except OSError as error:
        what = f"cannot unpack {ARCHIVE} into {folder} ({error.strerror})"
        raise LaunchError(f"{what}; set TMPDIR to a folder where 100 KB are free.") from None
    return [copies.get(word, word) for word in argv]


def crash(folder: str, pid: int) -> str:
    """Return the end of what a rank has written that crashed (unseen.py), "" if there is nothing.

    A script could have put anything there, such as a pipe that nobody writes to.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        file = os.open(os.path.join(folder, f"crash-{pid}"), flags)
        try:
            seen = os.fstat(file)
            if stat.S_ISREG(seen.st_mode):
                start = max(0, seen.st_size - _CRASH_BYTES)
                return os.pread(file, _CRASH_BYTES, start).decode(errors="replace")
        finally:
            os.close(file)
    return ""


def remove_left(pid: int, environ: Mapping[str, str]) -> None:
    """Remove the folder that a launcher left because it was killed."""
    for parent in {_parent(environ), "/tmp"}:
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                if name.startswith(_prefix(pid)):
                    _remove(os.path.join(parent, name))


def _parent(environ: Mapping[str, str]) -> str:
    return environ.get("TMPDIR") or "/tmp"


def _prefix(pid: int) -> str:
    return f"{PREFIX}{pid}-"


def _remove(folder: str) -> None:
    """Remove a folder of this user's with all that is in it, as far as that can be.

    In /tmp anybody can make an entry of that name, also a link. Once it is known to be ours nobody
    else can replace it there; and what it contains shutil removes without following links
    (rmtree.avoids_symlink_attacks, as on every Linux since Python 3.3).
    """
    import shutil  # at the end: it takes 2 ms

    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)
