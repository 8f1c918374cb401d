"""Folders: a running job's own, and those that scripts write to, on disks that may hang."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

from launcher.errors import LaunchError
from launcher.text.background import within

_PREFIX, SOCKET = "sm-launch-", "socket"  # of the folder's name; of the socket in it
_PARENT_BYTES = 60  # of the parent folder's path: a socket's path has at most 107 (unix(7))
_SECONDS = 1.0  # for a count of files: a job's end waits for it
_MOST_ENTRIES = 2000


def run_dir(environ: Mapping[str, str]) -> tuple[str, socket.socket]:
    """Make a folder for torchrun's temporary files, and a socket in it; return both.

    In TMPDIR, or in /tmp, if a path of TMPDIR would be too long for the socket. Raises LaunchError.
    """
    parent = os.path.abspath(environ.get("TMPDIR") or "/tmp")  # a relative one may have a long path
    if len(os.fsencode(parent)) > _PARENT_BYTES:
        parent = "/tmp"
    folder = os.path.join(parent, f"{_PREFIX}{os.getpid()}-{time.time_ns():x}")
    try:
        os.mkdir(folder, 0o700)  # fails if it exists
        try:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(os.path.join(folder, SOCKET))
            listener.listen()  # 128 keepers may wait
        except OSError:
            os.rmdir(folder)  # it is empty; remove() needs a descriptor, and perhaps none is free
            raise
    except OSError as error:
        what = f"cannot create a folder in {parent} with a socket in it ({error.strerror})"
        fix = f"set TMPDIR to a writable folder whose path has at most {_PARENT_BYTES} bytes"
        raise LaunchError(f"{what}; {fix}.") from None
    return folder, listener


def remove_left(pid: int, environ: Mapping[str, str]) -> None:
    """Remove the folder of a launcher that was killed."""
    import glob  # only `sm-launch local` needs it

    for parent in {environ.get("TMPDIR") or "/tmp", "/tmp"}:
        for folder in glob.glob(os.path.join(glob.escape(parent), f"{_PREFIX}{pid}-*")):
            remove(folder)


def remove(folder: str) -> None:
    """Remove a folder with its contents, as far as possible.

    Anybody can create an entry of that name in /tmp: shutil follows no links
    (rmtree.avoids_symlink_attacks, as on every Linux since Python 3.3).
    """
    import shutil  # not at the start: it takes 2 ms

    shutil.rmtree(folder, ignore_errors=True)


def files_below(folders: Sequence[str], age: float = math.inf) -> int:
    """Count the files below some folders that have changed within `age` seconds.

    A folder that does not exist has none. Return -1 if a second or 2,000 entries were not enough.
    """
    since = time.time() - age

    def count() -> int:
        changes = list(itertools.islice(_changes(folders), _MOST_ENTRIES + 1))
        return -1 if len(changes) > _MOST_ENTRIES else sum(change > since for change in changes)

    return within(_SECONDS, count, -1)


def _changes(folders: Sequence[str]) -> Iterator[float]:
    """Yield when each file has changed, in seconds since the epoch; for each folder, never."""
    for top, below, names in itertools.chain.from_iterable(map(os.walk, folders)):
        yield from (-math.inf for _ in below)
        for name in names:
            with contextlib.suppress(OSError):  # it is gone
                yield os.lstat(os.path.join(top, name)).st_ctime
