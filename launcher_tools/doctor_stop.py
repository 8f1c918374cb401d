"""Whether a stop, SIGTERM to PID 1, would reach the ranks of a job that runs in this place."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence

from launcher.host.cgroups import read_text
from launcher.job.options import INIT
from launcher.text.words import shortened
from launcher_tools.doctor_job import ReportLine, ok, warning

_MOST_ABOVE = 50
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "busybox")
_INITS = ("tini", "tini-static", "dumb-init", "docker-init", "catatonit")
_SYSTEMS = ("systemd", "init", "launchd")
_EXEC_FORM = 'use the exec form, ENTRYPOINT ["sm-launch"] or ["sm-launch", "init", ...] '
_SEE = "(docs/guide.md)"
_PUT_INIT = (
    "run it under the launcher's `init`: in your own image, or in any image with the "
    "estimator's container_entry_point and a channel that holds launcher.py (docs/guide.md)"
)


def stop(environ: Mapping[str, str], root: str = "", pid: int = 0) -> Iterator[ReportLine]:
    """Say what PID 1 is, and the way from there; the launcher would be this process."""
    pid = pid or os.getpid()
    above = _above(root, pid)
    words = _arguments(root, 1)
    if any(_is_launcher(parent) and "local" in parent for parent in above.values()):
        yield ok("stop", "`sm-launch local` forwards stops")
    elif pid == 1:
        yield ok("stop", "the launcher would be PID 1: every rank gets a stop")
    elif _init_answers(environ.get(INIT, "")) or (_is_launcher(words) and "init" in words):
        yield ok("stop", ("the launcher would run under `sm-launch init`: every rank gets a stop"))
    elif not words:
        yield ok("stop", "PID 1 cannot be seen: stop the launcher itself (SIGTERM)")
    else:
        yield from _from_pid_1(words, list(above))


def _from_pid_1(words: Sequence[str], above: Sequence[int]) -> Iterator[ReportLine]:
    """Say what becomes of a stop at a PID 1 with these arguments, no init of the launcher's."""
    name = _base(words[0])
    shown = shortened(" ".join(words), 80)
    if _is_launcher(words):
        yield ok("stop", f"PID 1 is a launcher, `{shown}`: its ranks get a stop")
    elif any("start_with_right_hostname" in word for word in words):
        yield warning("stop", "PID 1 is AWS's start script: no rank gets a stop", _PUT_INIT)
    elif _runs(words, "train"):
        seen = "PID 1 is SageMaker's toolkit, which ignores stops: no rank gets a stop"
        yield warning("stop", seen, _PUT_INIT)
    elif name in _SHELLS:
        seen = f"PID 1 is a shell (`{shown}`), which does not forward stops by itself"
        yield warning("stop", seen, _EXEC_FORM + _SEE)
    elif name in _INITS and above[:1] == [1]:
        yield ok("stop", f"{name} is PID 1 and forwards stops to the launcher")
    elif name in _INITS:
        seen = f"{name} is PID 1 and forwards stops only to its own child"
        yield warning("stop", seen, f"{_EXEC_FORM}instead of {name} {_SEE}")
    elif name in _SYSTEMS or 1 not in above:
        yield ok(
            "stop",
            (
                "the launcher would not run under a container's PID 1: stop the launcher itself "
                "(SIGTERM)"
            ),
        )
    else:
        seen = f"PID 1 is `{shown}`: a stop works if it forwards SIGTERM to the launcher"
        yield ok("stop", seen)


def _above(root: str, pid: int) -> dict[int, list[str]]:
    """Return the arguments of the processes above one, by their pids, the parent first."""
    found: dict[int, list[str]] = {}
    for _ in range(_MOST_ABOVE):
        match = re.search(r"^PPid:\s*(\d+)$", read_text(f"{root}/proc/{pid}/status"), re.MULTILINE)
        pid = int(match[1]) if match else 0
        if not pid:
            break
        found[pid] = _arguments(root, pid)
    return found


def _arguments(root: str, pid: int) -> list[str]:
    """Return a process's arguments; none if they cannot be seen."""
    text = read_text(f"{root}/proc/{pid}/cmdline").rstrip("\0")
    return text.split("\0") if text else []


def _is_launcher(words: Sequence[str]) -> bool:
    """Tell whether a process is the launcher: by its name, as a module, by its path."""
    return _runs(words, "sm-launch", "launcher", "launcher.py") or any(
        word.endswith("launcher/__main__.py") for word in words[:3]
    )


def _runs(words: Sequence[str], *names: str) -> bool:
    """Tell whether a process is one of these programs, or a Python that runs it."""
    if words and not _base(words[0]).startswith("python"):
        words = words[:1]
    program = [word for word in words[1:] if not word.startswith("-")][:1]
    return any(_base(word) in names for word in (*words[:1], *program))


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _init_answers(name: str) -> bool:
    if not name:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect("\0" + name)
        except OSError:
            return False  # the variable has outlived its init
    return True
