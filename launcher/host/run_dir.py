"""The folder on this host of a job that runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping

from launcher.errors import LaunchError
from launcher.text.log import log

PREFIX, SOCKET = "sm-launch-", "socket"  # of its name; of its socket's
_PARENT_BYTES = 60  # of the path of the folder above: a socket's has at most 107 (unix(7))


@contextlib.contextmanager
def run_dir(environ: Mapping[str, str]) -> Iterator[str]:
    """Make a folder for the launcher's socket and torchrun's temporary files; remove it after.

    Raises LaunchError.
    """
    parent = _parent(environ)
    if (length := len(os.fsencode(parent))) > _PARENT_BYTES:
        parent = "/tmp"
        log(
            f"TMPDIR is too long for a socket in it ({length} bytes; expected at most "
            f"{_PARENT_BYTES}): {parent} is used instead."
        )
    folder = os.path.join(parent, f"{_prefix(os.getpid())}{time.time_ns():x}")
    try:
        os.mkdir(folder, 0o700)  # only if it is not there
    except OSError as error:
        what = f"cannot create a folder in {parent} ({error.strerror})"
        fix = f"set TMPDIR to a writable folder whose path has at most {_PARENT_BYTES} bytes"
        raise LaunchError(f"{what}; {fix}.") from None
    try:
        yield folder
    finally:
        remove(folder)


def remove_left(pid: int, environ: Mapping[str, str]) -> None:
    """Remove the folder that a launcher left because it was killed."""
    for parent in {_parent(environ), "/tmp"}:
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                if name.startswith(_prefix(pid)):
                    remove(os.path.join(parent, name))


def _parent(environ: Mapping[str, str]) -> str:
    return environ.get("TMPDIR") or "/tmp"


def _prefix(pid: int) -> str:
    return f"{PREFIX}{pid}-"


def remove(folder: str) -> None:
    """Remove a folder of this user's with all that is in it, as far as that can be.

    In /tmp anybody can make an entry of that name, also a link. Once it is known to be ours nobody
    else can replace it there; and what it contains shutil removes without following links
    (rmtree.avoids_symlink_attacks, as on every Linux since Python 3.3).
    """
    import shutil  # at the end: it takes 2 ms

    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)
