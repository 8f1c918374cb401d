"""How a host watches its own ranks: it asks them every few seconds, and tells the coordinator when
nothing moves for a while, and when something does again. It asks them where they are, too, if
somebody wants to know.

While all ranks move other hosts hear nothing of it. Times are on the clock time.monotonic(). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Callable, NamedTuple

from launcher.text.words import plural
from launcher.watch.progress import ENDED, ENDS, Rank, answer_of, bounded, seconds
from launcher.watch.stacks import AT_EXIT, Asked, calls_of, kept_by, place, threads_of

_TO_ANSWER = 1.0  # s that a rank has
_LOOKS = 2  # that a rank misses until it counts as one that does not answer: machines are busy
_MOST_BYTES = 60_000  # of a message, which may have 64 KiB
# By the letter of the process's state; else it runs code that keeps Python's lock.
_WHY_SILENT = {
    "D": "it waits in the kernel",
    "T": "it was stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "Z": "it has ended",
    "": "it has ended",
}
_HOLDS = "it runs code that keeps Python's lock"


class _Watched(NamedTuple):
    """A rank: what it has said last; `known.still` is 0 if it moved then."""

    known: Rank
    heard_at: float
    error: str = ""  # why it cannot say how far it is
    is_there: bool = True  # it can be asked
    signal: int = 0  # at which it writes where it is; 0: none


class _Returned(NamedTuple):
    """A rank whose script has ended, and since when; its process may run on."""

    rank: int
    local_rank: int
    at: float
    runs_on: str = AT_EXIT  # in what


class Watch:
    """What is known of this host's ranks in one attempt, by pid. With `every` 0 none is asked."""

    def __init__(self, every: float, notify: float) -> None:
        self._every, self._quiet = every, notify / 2
        self._ranks: dict[int, _Watched] = {}
        self._returned: dict[int, _Returned] = {}
        self._look_at = math.inf
        self._answer_by = math.inf
        self._looks = 0
        self._told: tuple[list[Rank], int] = ([], 0)
        self.others = 0  # ranks that run, and neither wait nor have returned, as far as is known
        self._left_out = 0  # ranks of which no message holds the groups
        self._asked: list[Asked] = []
        self._asks = 0

    def joined(self, pid: int, rank: int, local_rank: int, number: int, now: float) -> None:
        """Take in a rank that can be asked; at signal `number` it writes where it is."""
        if not self._every:
            return
        self._begin(now)
        self._ranks[pid] = _Watched(Rank(rank, local_rank, 0), now, signal=number)

    def returned(self, pid: int, rank: int, local_rank: int, now: float) -> None:
        """Take in that a rank's script has ended; it may not have been asked before."""
        if self._every:
            self._begin(now)
            self._returned[pid] = _Returned(rank, local_rank, now)

    def _begin(self, now: float) -> None:
        if not (self._ranks or self._returned):
            self._look_at = now + self._every

    def answered(self, pid: int, fields: Mapping[str, Any], now: float) -> None:
        """Take in what a rank says. Raises one of several errors if it is not valid."""
        if "stacks" in fields:
            for asked in self._asked:
                if asked.number == fields["stacks"]:
                    asked.answered(pid, threads_of(fields["threads"]))
            return
        if pid not in self._ranks or fields["look"] != self._looks:
            return  # too late
        one = self._ranks[pid]
        one = one._replace(signal=int(fields.get("signal", one.signal)))
        if "kept" in fields and pid in self._returned:
            self._returned[pid] = self._returned[pid]._replace(runs_on=kept_by(fields))
        error = str(fields.get("error", ""))[:200]
        known = Rank(one.known.rank, one.known.local_rank, 0)
        if fields.get("ends"):
            where = place(calls_of(fields["calls"]))
            known = _without_waits(one.known, f"{ENDS}{where and f', in {where}'}")
            known = known._replace(still=seconds(fields["still"]))
        elif "groups" in fields:
            still, groups = answer_of(fields)
            # Where Python waits for a thread says nothing.
            where = "" if pid in self._returned else place(calls_of(fields["calls"]))
            known = known._replace(still=still, place=where, groups=groups)
        self._ranks[pid] = one._replace(heard_at=now, known=known, error=error)

    def wrote(self, pid: int, line: str) -> None:
        """Take in a line that a rank has written at its signal."""
        for asked in self._asked:
            asked.wrote(pid, line)

    def ask(self, now: float, *, may_signal: bool) -> tuple[Asked, Mapping[str, int]]:
        """Return what will hold where ranks are, once `over` returns it, and what to ask them."""
        self._asks += 1
        there = [pid for pid, one in self._ranks.items() if one.is_there]
        self._asked.append(Asked(self._asks, there, now, may_signal=may_signal))
        return self._asked[-1], {"stacks": self._asks}

    def to_signal(self, now: float) -> Mapping[int, int]:
        """Return the signals that ranks are to get now, by pid, to write where they are."""
        pids = {pid for asked in self._asked for pid in asked.to_signal(now)}
        # What has closed its connection would write to whatever has that descriptor now.
        there = {pid: one.signal for pid, one in self._ranks.items() if one.is_there and one.signal}
        return {pid: number for pid, number in there.items() if pid in pids}

    def over(self, now: float) -> list[Asked]:
        """Return what has been asked and is known now, as far as it will be."""
        over = [asked for asked in self._asked if asked.is_over(now)]
        self._asked = [asked for asked in self._asked if asked not in over]
        return over

    def due(self) -> float:
        """Return when something is due; infinite: never, as for ranks that cannot be asked."""
        is_any = self._ranks or self._returned
        looks = min(self._look_at, self._answer_by) if is_any else math.inf
        return min((looks, *(asked.due() for asked in self._asked)))

    def question(self, now: float) -> Mapping[str, int] | None:
        """Return what to ask all ranks now, if a look is due."""
        if now < self._look_at:
            return None
        self._looks += 1
        self._look_at = now + self._every
        self._answer_by = now + min(_TO_ANSWER, self._every / 2)
        return {"look": self._looks}

    def changes(
        self,
        ended: Collection[int],
        state_of: Callable[[int], str],
        now: float,
        running: Collection[int] = (),
    ) -> tuple[Rank, ...] | None:
        """Return of which ranks nothing moves, if that is not what was returned before.

        `ended` are pids of ranks that have succeeded, `running` of those that run; state_of(pid) is
        a letter as in proc(5).
        """
        if now < self._answer_by:
            return None
        self._answer_by = math.inf
        still = self._still(ended, state_of, now)
        for pid in self._returned:
            if pid in running:
                self._add_returned(still, pid, now)
        found = [rank for rank in still.values() if rank.still >= self._quiet]
        ranks = bounded(found, _MOST_BYTES)
        self._left_out = len(found) - len(ranks)
        idle = {rank for rank in ranks if rank.runs_on or rank.waits}
        self.others = sum(still.get(pid) not in idle for pid in running)
        what = [rank._replace(still=0) for rank in ranks], self.others if ranks else 0
        if what == self._told:
            return None
        self._told = what
        return ranks

    def _still(
        self, ended: Collection[int], state_of: Callable[[int], str], now: float
    ) -> dict[int, Rank]:
        """Return what is known of ranks that can be asked, or could be, by pid."""
        still = {}
        for pid, one in self._ranks.items():
            known, silent = one.known, now - one.heard_at
            if pid in ended:
                still[pid] = _without_waits(known._replace(still=silent), ENDED)
            elif one.is_there:
                if silent > _LOOKS * self._every:
                    why = does_not_answer(state_of(pid))
                    known = known._replace(still=known.still + silent, trouble=why)
                elif known.still:
                    known = known._replace(still=known.still + silent)
                still[pid] = known
        return still

    def _add_returned(self, still: dict[int, Rank], pid: int, now: float) -> None:
        """Add that a rank runs on whose script has ended, unless its collectives still move."""
        one = self._returned[pid]
        known = still.get(pid)
        if known is None:  # one that cannot be asked may be about to connect
            if now - one.at <= _LOOKS * self._every:
                return
            known = Rank(one.rank, one.local_rank, now - one.at)
        if known.still:
            seconds = min(known.still, now - one.at)
            still[pid] = known._replace(still=seconds, runs_on=one.runs_on)

    def left(self, pid: int) -> None:
        """Note that a rank cannot be asked any more: it has ended, or goes on without us."""
        if pid in self._ranks:
            self._ranks[pid] = self._ranks[pid]._replace(is_there=False)

    @property
    def error(self) -> str:
        """Why a rank cannot say how far it is, "" if each can."""
        if self._left_out:
            left_out = plural(self._left_out, "rank")
            return f"how far {left_out} of this host got does not fit into a message."
        for one in self._ranks.values():
            if one.error:
                return f"rank {one.known.rank} cannot say how far it is: {one.error}."
        return ""


def does_not_answer(state: str, *, may_signal: bool = True) -> str:
    """Return why a rank's process does not answer, by the letter of its state (proc(5)).

    And how to see where it is, unless it `may_signal` that.
    """
    why = _WHY_SILENT.get(state, _HOLDS)
    how = "; `sm-launch stacks` shows where, by a signal" if why == _HOLDS else ""
    return f"does not answer: {why}{'' if may_signal else how}"


def _without_waits(known: Rank, trouble: str) -> Rank:
    """Return a rank that has gone on from where it waited."""
    groups = tuple(group._replace(waits=0) for group in known.groups)
    return known._replace(trouble=trouble, groups=groups)
