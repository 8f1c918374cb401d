"""The processes of a job: found, told to end, and killed, wherever they went.

With the launcher as a subreaper, whatever the job's processes leave behind becomes its child.
"""

from __future__ import annotations

import contextlib
import os
import sys
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

    def left_behind(self, torchrun: int) -> list[psutil.Process]:
        """Return what is neither torchrun nor below it: what ranks that have ended have started."""
        import psutil

        spared = {torchrun}
        with contextlib.suppress(psutil.Error):
            spared |= {child.pid for child in psutil.Process(torchrun).children(recursive=True)}
        return [process for process in self.all() if process.pid not in spared]

    def of_group(self, pid: int) -> list[psutil.Process]:
        """Return the processes of the group that pid leads or led, without pid itself."""
        return [p for p in self.all() if p.pid != pid and _group(p.pid) == pid]


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may be gone by now."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def ending(pid: int) -> tuple[bool, int | None]:
    """Return whether a process has ended, and its exit code, negative for a signal.

    The exit code is 0 as long as none is decided, and None where it cannot be seen: torchrun has
    reaped the process, as it does within 0.1 s, or it is another user's. It is field 52 of
    /proc/PID/stat, in the form of wait(2), before the process is a zombie (proc(5)).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        ended, exit_code = fields[0] in (b"Z", b"X"), os.waitstatus_to_exitcode(int(fields[49]))
    except (OSError, IndexError, ValueError):
        return True, None
    if ended and exit_code == 0:
        try:
            os.readlink(f"/proc/{pid}/ns/pid")
        except PermissionError:  # the same that shows the exit code as 0 (ptrace(2))
            return True, None
        except OSError:
            pass
    return ended, exit_code


def response(pid: int, number: int) -> str:
    """Return what a process does at a signal: HANDLES, IGNORES or DIES, as far as /proc tells."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        fields = status(pid)
        for field, what in ((b"SigIgn", IGNORES), (b"SigCgt", HANDLES)):
            if int(fields[field], 16) >> (number - 1) & 1:
                return what
    return DIES


def status(pid: int) -> dict[bytes, bytes]:
    """Return the fields of /proc/PID/status (proc(5)). Raises OSError if the process is gone."""
    with open(f"/proc/{pid}/status", "rb") as file:
        return {name: value for name, _, value in (line.partition(b":") for line in file)}


def session(pid: int) -> int:
    """Return the leader of a process's session; torchrun makes each rank one. -1: it is gone."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return -1


def _group(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return -1
