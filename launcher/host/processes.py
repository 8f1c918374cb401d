"""The processes of a job: start, find, signal and reap them.

The launcher is a subreaper: the job's leftover processes become its children, beside what an entry
point had started before it executed the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Callable

from launcher.errors import CannotExecuteError, Disposition, LaunchError, NotFoundError

try:
    import psutil
except ImportError as error:  # or its part in C does not load
    _PSUTIL_ERROR = str(error)
else:
    _PSUTIL_ERROR = ""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_ENDED = ("", "Z", "X")  # as state_of() has it


def start(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    new_session: bool = False,
    tied: bool = False,
    hint: str = "",
    folder: str = "",
) -> subprocess.Popen[bytes]:
    """Start a child with this process's stdin, stdout and stderr, in its folder or another one.

    `tied`: the kernel sends it SIGTERM if this process is killed.
    Raises LaunchError if there is no such program, or its interpreter does not exist (exit code
    127; `hint` then says how to fix it), and if it cannot be executed (126).
    """
    name = argv[0]
    try:
        tie = tie_to_this_process() if tied else None
        return subprocess.Popen(
            argv,
            env=environ,
            cwd=folder or None,
            start_new_session=new_session,
            preexec_fn=tie,
        )
    except FileNotFoundError:
        if folder and not os.path.isdir(folder):
            raise LaunchError(f"the folder {folder} has been removed.") from None
        problem = f"{name} was not found{hint}"
        import shutil  # only for an error

        if shutil.which(name, path=environ.get("PATH")):
            problem = f"cannot execute {name}: its `#!` interpreter does not exist"
        raise NotFoundError(f"{problem}.") from None
    except OSError as error:
        raise CannotExecuteError(f"cannot execute {name}: {error.strerror}.") from None


def tie_to_this_process() -> Callable[[], None]:
    """Return what a child has to run (preexec_fn) for the kernel to end it if we are killed."""
    import ctypes  # only for a child that is tied

    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # killed before the kernel was told
            os._exit(128 + signal.SIGTERM)

    return tie


def reaped() -> list[tuple[int, int]]:
    """Reap all children that have ended, adopted ones too; return their pids and exit codes."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def reap(*started: subprocess.Popen[bytes]) -> bool:
    """Reap all children that have ended; return whether others remain.

    Sets `returncode` of those that `start` returned; Popen itself no longer can.
    """
    ended = dict(reaped())
    for child in started:
        child.returncode = ended.get(child.pid, child.returncode)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def send(process: psutil.Process | int, number: int) -> bool:
    """Send a signal to a process or pid; return False if it is gone, or another user's."""
    if not isinstance(process, int):
        if not process.is_running():
            return False  # its pid may be another process's by now
        process = process.pid
    try:
        os.kill(process, number)
    except OSError:
        return False
    return True


def require_psutil() -> None:
    """Raise LaunchError if psutil cannot be used, which a job's end needs."""
    if _PSUTIL_ERROR:
        raise LaunchError(
            f"psutil cannot be imported by {sys.executable} ({_PSUTIL_ERROR}); install it there."
        )


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it, each behind its parent; none if it is gone.

    psutil's own children() raises an error if /proc shows only one's own processes (hidepid=1).
    """
    children = _children()
    try:
        found = [psutil.Process(pid)]
    except psutil.Error:
        return []
    for process in found:  # which grows meanwhile
        found += children.pop(process.pid, ())  # once, whatever pids were used again meanwhile
    return found


def _children() -> dict[int, list[psutil.Process]]:
    """Return all processes, by the pids of their parents."""
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"], ad_value=None):
        children[process.info["ppid"]].append(process)
    return children


class Processes:
    """The processes of a job, among all below this one.

    Those are the job's that descend from torchrun when they are inspected, that are in its session
    or a rank's, or that have the job's mark in their environment from birth; and what descends from
    them. What an entry point started before it executed the launcher has none of these.

    `mark` is that variable's name and value.
    """

    def __init__(self, mark: tuple[str, str]) -> None:
        self._mark = mark
        self._known: set[psutil.Process] = set()
        self._sessions: set[int] = set()
        self._spared: set[int] = set()
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def add(self, *leaders: int) -> None:
        """Take the sessions that these lead, torchrun's and ranks', for the job's."""
        self._sessions.update(leaders)

    def spare(self, pid: int) -> None:
        """Never take a process for the job's, nor what is below it."""
        self._spared.add(pid)

    def all(self) -> list[psutil.Process]:
        """Return every process of the job, torchrun and leftover processes too."""
        children = _children()
        todo = [(process, False) for process in children.pop(os.getpid(), ())]
        found = []
        for process, parent_is_ours in todo:  # which grows meanwhile
            if process.pid in self._spared:
                continue
            is_ours = parent_is_ours or self._is_ours(process)
            todo += [(child, is_ours) for child in children.pop(process.pid, ())]
            if is_ours:
                found.append(process)
        self._known.update(found)
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        if process in self._known or session(process.pid) in self._sessions:
            return True
        name, value = self._mark
        with contextlib.suppress(psutil.Error, OSError):
            return bool(process.environ().get(name) == value)
        return False  # it is gone, or another user's

    def leftovers(self, torchrun: int) -> list[psutil.Process]:
        """Return what ranks that have ended have started: what is neither torchrun nor below it.

        Neither is what has ended meanwhile: zombies, and what torchrun has reaped.
        """
        found = self.all()
        spared = {process.pid for process in tree(torchrun)}  # later: torchrun may be starting some
        others = [process for process in found if process.pid not in spared]
        return [process for process in others if state_of(process.pid) not in _ENDED]

    def of_group(self, pid: int) -> list[psutil.Process]:
        """Return the other processes of the group that pid leads, or led while it ran."""
        return [p for p in self.all() if p.pid != pid and _group(p.pid) == pid]


def state_of(pid: int) -> str:
    """Return the letter of a process's state as in proc(5), such as T; "" if it is gone."""
    with contextlib.suppress(OSError, KeyError):
        return status(pid)[b"State"].decode().strip()[:1]
    return ""


def exit_state(pid: int) -> tuple[bool, int | None]:
    """Return whether a process has ended, and its exit code, negative for a signal.

    The exit code is 0 until the process begins to end, and None if it cannot be seen: torchrun
    has reaped the process, as it does within 0.1 s, or it is another user's. It is field 52 of
    /proc/PID/stat, encoded as for wait(2), and is set before the process is a zombie (proc(5)).
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
        except PermissionError:  # then /proc shows 0 for any exit code (ptrace(2))
            return True, None
        except OSError:
            pass
    return ended, exit_code


def response(pid: int, number: int) -> Disposition:
    """Return what a process does at a signal, as far as /proc tells."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        fields = status(pid)
        for field, what in ((b"SigIgn", Disposition.IGNORES), (b"SigCgt", Disposition.HANDLES)):
            if int(fields[field], 16) >> (number - 1) & 1:
                return what
    return Disposition.DEFAULT


def status(pid: int) -> dict[bytes, bytes]:
    """Return the fields of /proc/PID/status (proc(5)). Raises OSError if the process is gone."""
    with open(f"/proc/{pid}/status", "rb") as file:
        return {name: value for name, _, value in (line.partition(b":") for line in file)}


def session(pid: int) -> int:
    """Return the leader of a process's session, which each rank is of its own; -1 if it is gone."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return -1


def _group(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return -1
