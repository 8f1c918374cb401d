"""A running job's folder on this host."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from launcher.errors import LaunchError

_PREFIX, SOCKET = "sm-launch-", "socket"  # of the folder's name; of the socket in it
_PARENT_BYTES = 60  # of the parent folder's path: a socket's path has at most 107 (unix(7))


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
