"""This host's processes: start, find, signal and reap them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

from launcher.errors import WARNINGS, CannotExecuteError, LaunchError, NotFoundError
from launcher.host.cgroups import read_text

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
# In `stat`: of CPU, user and system, its own and of children that have ended; how many threads.
_CPU_TIMES, _THREADS = slice(11, 15), 17


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


def start_tied(
    argv: Sequence[str], environ: Mapping[str, str], *, folder: str, **options: Any
) -> int:
    """Start a child, as `start` does, in a session of its own, which ends with this process.

    Return its pid. `folder` is its current folder, "" for this process's. It ignores a scheduler's
    warnings, which would kill torchrun. Keepers restore their scripts' own dispositions.
    """
    options |= {"cwd": folder or None, "preexec_fn": tie_to_this_process(*WARNINGS)}
    child = start(argv, environ, start_new_session=True, **options)
    child.returncode = 0  # Popen must not wait for it: reap() does
    return child.pid


def tie_to_this_process(*ignored: int) -> Callable[[], None]:
    """Return a child's preexec_fn that has the kernel send it SIGTERM if this process is killed.

    The child ignores some signals.
    """
    import ctypes  # only tied children need it

    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def tie() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # killed before prctl() took effect
            os._exit(128 + signal.SIGTERM)

    return tie


def adopt_orphans() -> None:
    """Become the parent of the orphans of this process's children (a subreaper)."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(*started: subprocess.Popen[bytes]) -> dict[int, int]:
    """Reap all children that have ended, adopted ones too; return exit codes by pid.

    Sets `returncode` of these processes from `start`; Popen itself no longer can.
    """
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    for child in started:
        child.returncode = ended.get(child.pid, child.returncode)
    return ended


def send(pid: int, number: int) -> bool:
    """Send a signal to a process; return False if it is gone, or another user's."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def kill_tree(*pids: int, below: bool) -> None:
    """Kill processes, and, with `below`, all processes below them."""
    for pid in tree(pids) if below else pids:
        send(pid, signal.SIGKILL)


def tree(pids: Iterable[int]) -> list[int]:
    """Return processes and all below them, parents first."""
    below, found = _by_parent(), list(pids)
    for pid in found:  # it grows in the loop
        found += below.pop(pid, ())  # only once, even if a pid was reused meanwhile
    return found


def children() -> set[int]:
    """Return the pids of this process's children that have not ended."""
    return {*_by_parent()[os.getpid()]}


def _by_parent() -> dict[int, list[int]]:
    """Return the processes that have not ended, and that this user may see, by their parents."""
    found: dict[int, list[int]] = defaultdict(list)
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        # The state is the main thread's, which may end before others.
        if (fields := stat(pid)) and (fields[0] not in ("Z", "X") or int(fields[_THREADS]) > 1):
            found[int(fields[1])].append(pid)
    return found


def cpu_of(pid: int) -> float:
    """Return how many seconds of CPU a process and all below it have used."""
    ticks = sum(sum(map(int, stat(each)[_CPU_TIMES])) for each in tree([pid]))
    return ticks / os.sysconf("SC_CLK_TCK")


def state_of(pid: int) -> str:
    """Return the letter of a process's state as in proc(5), such as T; "" if it is gone."""
    return "".join(stat(pid)[:1])


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (proc(5)); none if it is gone."""
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
