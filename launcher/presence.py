"""What a launcher tells the init above it (init.py), over the Unix socket that LAUNCHER_INIT names.

It connects as soon as it can take a stop, stays connected until it ends, and says at its end with
which exit code, and whether it was stopped: `143 stopped`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection, Mapping
from typing import NamedTuple

from launcher.job.options import INIT
from launcher.processes import status


class Ending(NamedTuple):
    """How a launcher ends; `was_stopped`: by a stop on any host, not by a failure."""

    exit_code: int
    was_stopped: bool = False


class Presence:
    """A launcher's word to the init above it: here from the start of the block to its end."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        if environ.get(INIT):
            # Where nobody listens, the variable has outlived its init.
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect("\0" + environ[INIT])

    def __enter__(self) -> Presence:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket:
            self._socket.close()

    def ends(self, ending: Ending) -> None:
        """Say how this launcher is about to end."""
        if self._socket:
            word = f"{ending.exit_code} stopped" if ending.was_stopped else str(ending.exit_code)
            with contextlib.suppress(OSError):
                self._socket.sendall(word.encode())


def understood(word: bytes) -> Ending | None:
    """Return what a launcher said with `ends`; None where these are not such words."""
    match = re.fullmatch(rb"(\d{1,3})( stopped)?", word)
    return Ending(int(match[1]), bool(match[2])) if match else None


def may_speak(pid: int, uid: int, command: int, launchers: Collection[int]) -> bool:
    """Tell whether the init of a command takes a process of some user for a launcher.

    An abstract socket has no permissions of its own: any user of the same network can connect. The
    init's own user may, root, and the command's, which gosu and the like have changed. So may what
    runs below the command as another user (su, sudo), unless a launcher runs it: as a job's rank.
    Arguments: the process's pid and uid; the pids of the command (0: has ended) and of launchers.
    """
    if pid == 0:
        return False  # in another container, on the same network
    if uid in (0, os.geteuid()):
        return True
    # psutil takes five times as long, 1.2 ms, and somebody may come a thousand times a second.
    try:
        if uid == int(status(command)[b"Uid"].split()[1]):  # the effective one
            return True
        while pid > 1:
            pid = int(status(pid)[b"PPid"])
            if pid in launchers:
                return False
            if pid == command:
                return True
    except OSError:
        pass  # one of them is gone
    return False
