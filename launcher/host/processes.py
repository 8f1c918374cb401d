"""This host's processes: start, find, signal and reap them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from launcher.errors import CannotExecuteError, LaunchError, NotFoundError

try:
    import psutil
except ImportError as error:  # or its C extension does not load
    _PSUTIL_ERROR = str(error)
else:
    _PSUTIL_ERROR = ""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def start(
    argv: Sequence[str], environ: Mapping[str, str], *, hint: str = "", **options: Any
) -> subprocess.Popen[bytes]:
    """Start a child with this process's streams; the options are Popen's.

    Raises LaunchError if there is no such program, or if its interpreter does not exist (exit code
    127; `hint` adds how to fix that), and if it cannot be executed (126).
    """
    name, folder = argv[0], options.get("cwd")
    try:
        return subprocess.Popen(argv, env=environ, **options)
    except FileNotFoundError:
        if folder and not os.path.isdir(folder):
            raise LaunchError(f"the folder {folder} has been removed.") from None
        problem = f"{name} was not found{hint}"
        import shutil  # only an error needs it

        if shutil.which(name, path=environ.get("PATH")):
            problem = f"cannot execute {name}: its `#!` interpreter does not exist"
        raise NotFoundError(f"{problem}.") from None
    except OSError as error:
        raise CannotExecuteError(f"cannot execute {name}: {error.strerror}.") from None


def tie_to_this_process() -> Callable[[], None]:
    """Return a child's preexec_fn that has the kernel send it SIGTERM if this process is killed."""
    import ctypes  # only tied children need it

    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # killed before prctl() took effect
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

    Sets `returncode` of these processes from `start`; Popen itself no longer can.
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
            return False  # another process may have its pid by now
        process = process.pid
    try:
        os.kill(process, number)
    except OSError:
        return False
    return True


def require_psutil() -> None:
    """Raise LaunchError if psutil cannot be used; a job's end needs it."""
    if _PSUTIL_ERROR:
        raise LaunchError(
            f"psutil cannot be imported by {sys.executable} ({_PSUTIL_ERROR}); install it there."
        )


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all processes below it, parents first; none if it is gone.

    psutil's own children() fails if /proc shows a user only their own processes (hidepid=1).
    """
    children = _children()
    try:
        found = [psutil.Process(pid)]
    except psutil.Error:
        return []
    for process in found:  # it grows in the loop
        found += children.pop(process.pid, ())  # only once, even if a pid was reused meanwhile
    return found


def cpu_of(pid: int) -> float:
    """Return how many seconds of CPU a process and all below it have used."""
    used = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            used += sum(process.cpu_times()[:4])  # with those of children that have ended
    return used


def environments() -> list[Mapping[str, str]]:
    """Return the environments with which the processes began that this user may see."""
    found = psutil.process_iter(["environ"], ad_value=None)
    return [process.info["environ"] or {} for process in found]


def _children() -> dict[int, list[psutil.Process]]:
    """Return all processes, grouped by their parents' pids."""
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"], ad_value=None):
        children[process.info["ppid"]].append(process)
    return children


def kill_tree(pid: int, *, below: bool) -> None:
    """Kill a process, and, with `below`, all processes below it."""
    for process in tree(pid) if below else (pid,):
        send(process, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of the orphans of this process's children (a subreaper)."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the pids of this process's children that have not ended."""
    pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
    seen = ((pid, stat(pid)[:2]) for pid in pids)
    own = b"%d" % os.getpid()
    return {pid for pid, fields in seen if fields[1:] == [own] and fields[0] not in (b"Z", b"X")}


def state_of(pid: int) -> str:
    """Return the letter of a process's state as in proc(5), such as T; "" if it is gone."""
    return b"".join(stat(pid)[:1]).decode()


def stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on (proc(5)); none if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
    return []
