"""Tells the launcher, from inside a rank's process, how far its collectives are.

A thread waits for the launcher's questions; it exists only once the script imports
torch.distributed, and answers within a millisecond or so. While something moves that is all that it
says; else it says what this rank has begun, what of it has not ended, and where its main thread is.
If it does not answer, C code of the script's does not release the interpreter, or the process is
stopped.

It reads torch's flight recorder of gloo (torch/csrc/distributed/c10d/FlightRecorder.hpp, from torch
2.8 on). NCCL has one of its own, which is not read yet: that asks the GPU for the state of events,
and no GPU was at hand to try what it does to a job.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

_MODULE = "torch.distributed.distributed_c10d"
_ENTRIES = "2000"  # of the recorder: torch's own default where it is on by itself
_HERE = os.path.dirname(os.path.abspath(__file__))
# rank.py, too, which lies beside this file if the launcher is one file.
_OURS = {os.path.join(folder, "rank.py") for folder in (_HERE, f"{os.path.dirname(_HERE)}/run")}
_MOST_GROUPS, _MOST_TEXT = 64, 2000  # of an answer: groups, and characters of one's ranks


def begin(connect: Callable[[], Any], hello: dict[str, Any]) -> None:
    """Answer the launcher's questions once the script imports torch.distributed.

    connect() returns a connection to it (rank.py); hello says which rank this is.
    """

    class AtImport:
        """A finder that finds nothing, but sees what is imported."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == _MODULE:
                sys.meta_path.remove(AtImport)
                if os.getpid() != hello["watch"]:
                    return  # a process that the script has forked is no rank
                _record()
                with contextlib.suppress(OSError, RuntimeError):  # no launcher, no thread
                    Watch(connect(), hello)

    sys.meta_path.insert(0, AtImport)


def _record() -> None:
    """Have the recorder on. NCCL's goes by the same variable, so not where there are GPUs."""
    if not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


class Watch:
    """The thread that answers, on a connection of its own."""

    def __init__(self, launcher: Any, hello: dict[str, Any]) -> None:
        self._launcher, self._pid = launcher, os.getpid()
        self._main = threading.main_thread().ident
        self._same: Any = None  # what was the same at the last looks
        self._since = 0.0
        self._busy = _thread.allocate_lock()
        launcher.send(hello)
        atexit.register(self._end)
        _thread.start_new_thread(self._run, ())

    def _end(self) -> None:
        """Ask torch nothing while Python ends: a thread that it stops in C++ would abort it."""
        if os.getpid() == self._pid:
            self._busy.acquire(timeout=1)

    def _run(self) -> None:
        try:
            for question in self._launcher.questions():
                with self._busy:
                    answer = self._answer()
                self._launcher.send({"look": question["look"], **answer})
        except Exception:  # the launcher is gone, or Python is
            return

    def _answer(self) -> dict[str, Any]:
        try:
            world: Any = getattr(sys.modules.get(_MODULE), "_world", None)
            names = dict(world.pg_names) if world else {}
            numbers = recorded(entries=False), [_sequence(group) for group in names]
            now = time.monotonic()
            if numbers != self._same or not names:
                self._same, self._since = numbers, now
                return {}
            entries = recorded(entries=True).get("entries", ())
            return {
                "still": now - self._since,
                "place": place(sys._current_frames().get(self._main or 0)),
                "groups": groups(names, world.pg_group_ranks, entries)[-_MOST_GROUPS:],
            }
        except Exception as error:  # of a torch that is other than those that we know
            return {"error": f"{type(error).__name__}: {error}"}


def recorded(*, entries: bool) -> dict[str, Any]:
    """Return what torch's recorder holds, with or without its entries; {} if there is none."""
    dump = getattr(sys.modules["torch._C._distributed_c10d"], "_dump_fr_trace_json", None)
    return dict(json.loads(dump(entries, False))) if dump else {}


def groups(
    names: Mapping[Any, str],
    ranks_of: Mapping[Any, Iterable[int]],
    entries: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return how far each process group is (progress.Group)."""
    found, seen = [], dict[str, int]()
    has_lost = bool(entries) and entries[0]["record_id"] > 0  # the oldest ones, for lack of room
    for group, name in names.items():
        ranks = ranges(sorted(ranks_of[group]))
        order = seen[ranks] = seen.get(ranks, -1) + 1  # among groups of the same ranks
        if len(ranks) <= _MOST_TEXT:
            own = [one for one in entries if one["process_group"][0] == name]
            count = _sequence(group) if has_lost else 0
            found.append({"ranks": ranks, "order": order, **summary(own, count)})
    return found


def _sequence(group: Any) -> int:
    """Return a group's own count, which gloo's point-to-point operations move, too."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend without
        return 0


def summary(own: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    """Return the last collective that a group has begun, and the first that has not ended.

    `waits` is that one's number, 0 if there is none; `op` and `of` say what it is, and its size.
    `count`, of its operations, is for a group of which the recorder holds no entry any more.
    """
    newest = max((one["pg_id"] for one in own), default=0)  # a name may come again
    own = [one for one in own if one["pg_id"] == newest and not one["is_p2p"]]
    last = max((one["collective_seq_id"] for one in own), default=count)
    begun = [one for one in own if not one["retired"]]
    first = min(begun, key=lambda one: int(one["collective_seq_id"]), default=None)
    said = {"name": "", "last": last, "waits": 0}
    label = own[0]["process_group"][1] if own else ""
    if label not in ("", "undefined"):
        said["name"] = label
    if first:
        said["waits"] = first["collective_seq_id"]
        said["op"] = str(first["profiling_name"]).partition(":")[2]
        said["of"] = size(first.get("input_sizes") or [], first.get("input_dtypes") or [])
    return said


def size(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> str:
    """Return the shape and type of a collective's first input, as in `1024x2 Float`."""
    if not sizes:
        return ""
    return f"{'x'.join(map(str, sizes[0])) or 'one'} {types[0] if types else ''}".strip()


def ranges(ranks: Sequence[int]) -> str:
    """Return ranks in few characters: `0-7`, `0-56:8` for each eighth, `0,1,5` for others."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if all(after - before == step for before, after in zip(ranks, ranks[1:])):
            return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def place(frame: Any) -> str:
    """Return where the innermost frame is that is the user's own: `load, data.py:88`."""
    library = os.path.dirname(os.__file__) + os.sep
    innermost = frame
    while frame is not None:
        path = frame.f_code.co_filename
        is_library = path.startswith((library, "<frozen ")) or "-packages/" in path
        if not is_library and path not in _OURS:
            break
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
