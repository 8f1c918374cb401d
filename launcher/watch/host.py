"""How a host watches its own ranks: it asks them every few seconds, and tells the coordinator when
nothing moves for a while, and when something does again.

While all ranks move nothing is sent to other hosts. Times are on the clock time.monotonic().
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Callable, NamedTuple

from launcher.watch.progress import ENDED, Rank, answer_of, bounded

_TO_ANSWER = 1.0  # s that a rank has
_MOST_BYTES = 60_000  # of a message, which may have 64 KiB
# By the letter of the process's state; else it runs code that keeps Python's lock.
_WHY_SILENT = {
    "D": "it waits in the kernel",
    "T": "it was stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "Z": "it has ended",
}
_HOLDS = "it runs code that keeps Python's lock"


class _Watched(NamedTuple):
    rank: int
    local_rank: int
    heard_at: float
    known: Rank | None = None  # what it has said, if nothing moves; None: it moves
    error: str = ""  # why it cannot say how far it is
    is_there: bool = True  # it can be asked


class Watch:
    """What is known of this host's ranks in one attempt, by pid."""

    def __init__(self, every: float, notify: float) -> None:
        self._every, self._quiet = every, notify / 2
        self._ranks: dict[int, _Watched] = {}
        self._look_at = math.inf
        self._answer_by = math.inf
        self._looks = 0
        self._told: list[Rank] = []

    def joined(self, pid: int, rank: int, local_rank: int, now: float) -> None:
        """Take in a rank that can be asked."""
        if not self._ranks:
            self._look_at = now + self._every
        self._ranks[pid] = _Watched(rank, local_rank, now)

    def answered(self, pid: int, fields: Mapping[str, Any], now: float) -> None:
        """Take in what a rank says. Raises one of several errors if it is not valid."""
        if pid not in self._ranks or fields["look"] != self._looks:
            return  # too late
        one = self._ranks[pid]._replace(heard_at=now, known=None)
        one = one._replace(error=str(fields.get("error", ""))[:200])
        if "groups" in fields:
            still, place, groups = answer_of(fields)
            one = one._replace(known=Rank(one.rank, one.local_rank, still, "", place, groups))
        self._ranks[pid] = one

    def due(self) -> float:
        """Return when `tick` is due; infinite: never, as for ranks that cannot be asked."""
        return min(self._look_at, self._answer_by) if self._ranks else math.inf

    def question(self, now: float) -> Mapping[str, int] | None:
        """Return what to ask all ranks now, if a look is due."""
        if now < self._look_at:
            return None
        self._looks += 1
        self._look_at = now + self._every
        self._answer_by = now + min(_TO_ANSWER, self._every / 2)
        return {"look": self._looks}

    def changes(
        self, ended: Collection[int], state_of: Callable[[int], str], now: float
    ) -> tuple[Rank, ...] | None:
        """Return of which ranks nothing moves, if that is not what was returned before.

        `ended` are pids of ranks that have succeeded; state_of(pid) is a letter as in proc(5).
        """
        if now < self._answer_by:
            return None
        self._answer_by = math.inf
        still = []
        for pid, one in self._ranks.items():
            known = one.known or Rank(one.rank, one.local_rank, 0)
            silent = now - one.heard_at
            if pid in ended:
                still.append(_without_waits(known, silent, ENDED))
            elif one.is_there and silent > self._every:
                why = f"does not answer: {_WHY_SILENT.get(state_of(pid), _HOLDS)}"
                still.append(_without_waits(known, silent, why))
            elif one.is_there:
                still.append(known)
        ranks = bounded([rank for rank in still if rank.still >= self._quiet], _MOST_BYTES)
        what = [rank._replace(still=0) for rank in ranks]
        if what == self._told:
            return None
        self._told = what
        return ranks

    def left(self, pid: int) -> None:
        """Note that a rank cannot be asked any more: it has ended, or goes on without us."""
        if pid in self._ranks:
            self._ranks[pid] = self._ranks[pid]._replace(is_there=False)

    @property
    def error(self) -> str:
        """Why a rank cannot say how far it is, "" if each can."""
        for one in self._ranks.values():
            if one.error:
                return f"rank {one.rank} cannot say how far it is: {one.error}."
        return ""


def _without_waits(known: Rank, still: float, trouble: str) -> Rank:
    """Return a rank that says nothing more: where it waited before, it may have gone on."""
    groups = tuple(group._replace(waits=0) for group in known.groups)
    return known._replace(still=still, trouble=trouble, groups=groups)
