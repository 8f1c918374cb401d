"""The control groups that limit this process, and the contents of small files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

_EVENTS = ("events", "oom_control")  # of a memory cgroup, v2 and v1
_REFUSED = re.compile(r"^max (\d+)$", re.MULTILINE)  # of pids.events
_OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def folders(controller: str, root: str = "", *, own: bool = False) -> Iterator[str]:
    """Yield the folders of this process's group and of all groups above it, v1 and v2, top first.

    Or with `own` candidates for the folder of its own group, likeliest first: in a container the
    path may be the host's, whose first folders do not exist here, although the root is the group's.
    (kernel, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/cgroups.rst)
    """
    for line in read_text(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = f"{root}/sys/fs/cgroup" + (f"/{controller}" if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield os.path.join(top, *(parts[depth:] if own else parts[:depth]))


def read_text(path: str) -> str:
    """Return what a small file holds, "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def oom_kills(root: str = "") -> dict[str, int]:
    """Return how many out-of-memory kills the kernel has recorded, by the words to report them.

    They are this process's memory cgroup's: v2 memory.events or v1 memory.oom_control, which also
    count kills because the machine's memory ran out. Without them, /proc/vmstat counts the whole
    machine's kills, in other containers, too (kernel,
    Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
    """
    own = folders("memory", root, own=True)  # other processes use the memory of those above, too
    files = [f"{folder}/memory.{name}" for folder in own for name in _EVENTS]
    for path in (*files, f"{root}/proc/vmstat"):
        if match := _OOM_KILL.search(read_text(path)):
            where = "the memory cgroup" if path in files else "the machine"
            return {f"out of memory: {where} recorded an OOM kill (oom_kill)": int(match[1])}
    return {}


def refused_processes(root: str = "") -> dict[str, int]:
    """Return how often each limit has refused a process or thread, by the words to report it.

    For each group with a limit that this process is in (cgroup-v2.rst, "PID").
    """
    found = {}
    for folder in folders("pids", root):
        limit = read_text(f"{folder}/pids.max").strip()
        if match := _REFUSED.search(read_text(f"{folder}/pids.events")):
            where = f"{folder}/pids.max allows {limit}".removeprefix(root)
            found[f"out of processes and threads: {where}"] = int(match[1])
    return found


def risen(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Return the words for the first of these counts that has risen; "" if none has."""
    return next((words for words, count in now.items() if count > before.get(words, count)), "")
