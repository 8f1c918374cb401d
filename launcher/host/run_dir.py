"""A running job's folder on this host."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping

from launcher.errors import LaunchError
from launcher.text.log import log

_PREFIX, SOCKET = "sm-launch-", "socket"  # of the folder's name; of the socket in it
_BACKLOG = 128  # connections that keepers wait for
_PARENT_BYTES = 60  # of the parent folder's path: a socket's path has at most 107 (unix(7))


@contextlib.contextmanager
def run_dir(environ: Mapping[str, str]) -> Iterator[tuple[str, socket.socket]]:
    """Make a folder for torchrun's temporary files, and a socket in it; remove it at the end.

    Raises LaunchError.
    """
    parent = environ.get("TMPDIR") or "/tmp"
    if (length := len(os.fsencode(parent))) > _PARENT_BYTES:
        parent = "/tmp"
        log(
            f"TMPDIR is too long for a socket in it ({length} bytes; expected at most "
            f"{_PARENT_BYTES}): {parent} is used instead."
        )
    folder = os.path.join(parent, f"{_PREFIX}{os.getpid()}-{time.time_ns():x}")
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            os.mkdir(folder, 0o700)  # fails if it exists
            stack.callback(remove, folder)
            listener.bind(os.path.join(folder, SOCKET))
            listener.listen(_BACKLOG)
        except OSError as error:
            what = f"cannot create a folder in {parent} with a socket in it ({error.strerror})"
            fix = f"set TMPDIR to a writable folder whose path has at most {_PARENT_BYTES} bytes"
            raise LaunchError(f"{what}; {fix}.") from None
        yield folder, listener


def remove_left(pid: int, environ: Mapping[str, str]) -> None:
    """Remove the folder of a launcher that was killed."""
    import glob  # only `sm-launch local` needs it

    for parent in {environ.get("TMPDIR") or "/tmp", "/tmp"}:
        for folder in glob.glob(os.path.join(glob.escape(parent), f"{_PREFIX}{pid}-*")):
            remove(folder)


def remove(folder: str) -> None:
    """Remove one of this user's folders with its contents, as far as possible.

    In /tmp anybody can create an entry of that name, even a link. Once we have seen that it is
    ours, nobody else can replace it; and shutil removes its contents without following links
    (rmtree.avoids_symlink_attacks, as on every Linux since Python 3.3).
    """
    import shutil  # not at the start: it takes 2 ms

    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)
