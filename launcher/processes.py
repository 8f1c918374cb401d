"""The processes of a job: found, told to end, and killed, wherever they went.

With the launcher as a subreaper, whatever the job's processes leave behind becomes its child.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from launcher.signals import reap

if TYPE_CHECKING:
    import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
HANDLES, IGNORES, DIES = "handles", "ignores", "dies"


class Processes:
    """All processes below this one but those that were there before (a shell's, before exec)."""

    def __init__(self) -> None:
        self._not_ours: set[int] = set()
        if reap()[1]:
            self._not_ours = {process.pid for process in self.all()}
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def all(self) -> list[psutil.Process]:
        """Return every process of the job, torchrun and orphans too."""
        import psutil  # 15 ms of CPU that a job which leaves nothing behind need not spend

        children = psutil.Process().children(recursive=True)
        return [process for process in children if process.pid not in self._not_ours]

    def left_behind(self, torchrun: int, ranks: Iterable[int]) -> list[psutil.Process]:
        """Return what is neither torchrun, nor below it, nor in the session of one of the ranks.

        torchrun makes each rank the leader of a session.
        """
        import psutil

        spared = {torchrun}
        with contextlib.suppress(psutil.Error):
            spared |= {child.pid for child in psutil.Process(torchrun).children(recursive=True)}
        sessions = set(ranks)
        return [p for p in self.all() if p.pid not in spared and _session(p.pid) not in sessions]

    def of_group(self, pid: int) -> list[psutil.Process]:
        """Return the processes of the group that pid leads or led, without pid itself."""
        return [p for p in self.all() if p.pid != pid and _group(p.pid) == pid]


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may be gone by now."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def response(pid: int, number: int) -> str:
    """Return what a process does at a signal: HANDLES, IGNORES or DIES, as far as /proc tells."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file)
        for field, what in ((b"SigIgn", IGNORES), (b"SigCgt", HANDLES)):  # proc(5)
            if int(lines[field], 16) >> (number - 1) & 1:
                return what
    return DIES


def _session(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return -1


def _group(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return -1
