"""How a host watches its own ranks: it polls them every few seconds, and has the coordinator know
when some make no progress for a while, and when they do again. On request it finds out where they
are, too.

While all ranks make progress other hosts hear nothing of it. Nothing is done here: what is to be
sent, and to whom, is returned. But what is known is kept in objects that change. Times are on the
clock time.monotonic(), waits in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Callable, NamedTuple

from launcher.text.words import plural
from launcher.watch.progress import ENDED, ENDS, StalledRank, bounded, groups_of
from launcher.watch.stacks import (
    AT_EXIT,
    MOST_CALLS,
    Calls,
    Threads,
    calls_in,
    calls_of,
    in_place,
    kept_by,
    place,
    text_of,
    threads_of,
)

_REPLY_SECONDS = 1.0  # that a rank has to say how far it is
_MISSES = 2  # polls that a rank misses until it counts as one that does not reply: hosts are busy
_MOST_BYTES = 60_000  # of a message, which may have 64 KiB
_LONGEST_ERROR = 200  # characters
# That a rank has to say where it is; and after that to write it, at a signal.
_STACKS_SECONDS, _WRITE_SECONDS = 0.5, 1.0
# By the letter of the process's state; else it runs code that keeps Python's lock.
_WHY_SILENT = {
    "D": "it is blocked in the kernel",
    "T": "it is suspended (SIGSTOP)",
    "t": "it is stopped in a debugger",
    "Z": "it has ended",
    "": "it has ended",
}
_HOLDS_LOCK = "it is running code that holds Python's lock (the GIL)"


class NoProgress(NamedTuple):
    """What the coordinator is to know of a host: its ranks without progress.

    `others` counts those that run, and neither wait nor run on after their script, as far as is
    known.
    """

    ranks: tuple[StalledRank, ...]
    others: int


class _Polled(NamedTuple):
    """A rank that is polled: its last reply; `known.unchanged` is 0 if it had made progress."""

    known: StalledRank
    replied_at: float
    error: str = ""  # why it cannot say how far it is
    is_connected: bool = True
    signal: int = 0  # at which it writes where it is; 0: none


class _Returned(NamedTuple):
    """A rank whose script has ended, and since when; its process may run on."""

    rank: int
    local_rank: int
    at: float
    runs_on: str = AT_EXIT  # in what


class Watch:
    """What is known of this host's ranks in one attempt, by pid. With `every` 0 none is polled."""

    def __init__(self, every: float, notify: float) -> None:
        self._every, self._reported_from = every, notify / 2
        self._ranks: dict[int, _Polled] = {}
        self._returned: dict[int, _Returned] = {}
        self._polls, self._poll_at, self._replies_until = 0, math.inf, math.inf
        self._report = NoProgress((), 0)  # the last, without times
        self._without_room = 0  # ranks of which no message holds the groups
        self._requests: list[CallsRequest] = []  # that are not over
        self._requested = 0

    # What ranks report.

    def connected(self, pid: int, rank: int, local_rank: int, number: int, now: float) -> None:
        """Take in a rank that can be polled; at signal `number` it writes where it is."""
        if self._every:
            self._poll_at = min(self._poll_at, now + self._every)
            self._ranks[pid] = _Polled(StalledRank(rank, local_rank, 0), now, signal=number)

    def script_ended(self, pid: int, rank: int, local_rank: int, now: float) -> None:
        """Take in that a rank's script has ended; it may not have been polled before."""
        if self._every:
            self._poll_at = min(self._poll_at, now + self._every)
            self._returned[pid] = _Returned(rank, local_rank, now)

    def replied(self, pid: int, fields: Mapping[str, Any], now: float) -> None:
        """Take in a rank's reply. Raises one of several errors if it is not valid."""
        if "stacks" in fields:
            for request in self._requests:
                if request.number == fields["stacks"]:
                    request.threads[pid] = threads_of(fields["threads"])
        elif pid in self._ranks and fields["poll"] == self._polls:  # else it is too late
            self._take_progress(pid, fields, now)

    def _take_progress(self, pid: int, fields: Mapping[str, Any], now: float) -> None:
        one, has_returned = self._ranks[pid], pid in self._returned
        number = int(fields.get("signal", one.signal))
        error = str(fields.get("error", ""))[:_LONGEST_ERROR]
        if "kept" in fields and has_returned:
            self._returned[pid] = self._returned[pid]._replace(runs_on=kept_by(fields))
        known = StalledRank(one.known.rank, one.known.local_rank, 0)
        if "unchanged" in fields:
            calls, unchanged = calls_of(fields["calls"]), float(fields["unchanged"])
            if fields.get("ends"):
                known = one.known.without_waits(f"{ENDS}{in_place(calls)}")
                known = known._replace(unchanged=unchanged)
            else:
                # Where Python waits for a thread says nothing.
                where = "" if has_returned else place(calls)
                groups = groups_of(fields["groups"])
                known = known._replace(unchanged=unchanged, place=where, groups=groups)
        self._ranks[pid] = one._replace(known=known, replied_at=now, error=error, signal=number)

    def wrote(self, pid: int, line: str) -> None:
        """Take in a line that a rank has written at its signal."""
        for request in self._requests:
            request.wrote(pid, line)

    def disconnected(self, pid: int) -> None:
        """Note that a rank cannot be polled any more: it has ended, or goes on without us."""
        if pid in self._ranks:
            self._ranks[pid] = self._ranks[pid]._replace(is_connected=False)

    # What is due.

    def due(self) -> float:
        """Return when something is due; infinite: never, as for ranks that cannot be polled."""
        requests = [request.due() for request in self._requests]
        return min((self._poll_at, self._replies_until, *requests))

    def poll(self, now: float) -> Mapping[str, int] | None:
        """Return the request to send to all ranks, if a poll is due."""
        if now < self._poll_at:
            return None
        self._polls += 1
        self._poll_at = now + self._every
        self._replies_until = now + min(_REPLY_SECONDS, self._every / 2)
        return {"poll": self._polls}

    def report(
        self,
        succeeded: Collection[int],
        state_of: Callable[[int], str],
        now: float,
        running: Collection[int] = (),
    ) -> NoProgress | None:
        """Return what the coordinator is to know after a poll, if that is not what it knows.

        `succeeded` are pids of ranks that have, `running` of those that run; state_of(pid) is a
        letter as in proc(5).
        """
        if now < self._replies_until:
            return None
        self._replies_until = math.inf
        known = self._known(succeeded, state_of, now)
        for pid in self._returned:
            if pid in running:
                self._add_returned(known, pid, now)
        found = [rank for rank in known.values() if rank.unchanged >= self._reported_from]
        ranks = bounded(found, _MOST_BYTES)
        self._without_room = len(found) - len(ranks)
        idle = {rank for rank in ranks if rank.runs_on or rank.waits}
        report = NoProgress(ranks, sum(known.get(pid) not in idle for pid in running))
        timeless = tuple(rank._replace(unchanged=0) for rank in ranks)
        before, self._report = self._report, NoProgress(timeless, report.others if ranks else 0)
        return None if self._report == before else report

    def _known(
        self, succeeded: Collection[int], state_of: Callable[[int], str], now: float
    ) -> dict[int, StalledRank]:
        """Return what is known of ranks that can be polled, or have succeeded, by pid."""
        found = {}
        for pid, one in self._ranks.items():
            known, age = one.known, now - one.replied_at
            if pid in succeeded:
                found[pid] = known.without_waits(ENDED)._replace(unchanged=age)
            elif one.is_connected:
                unchanged = known.unchanged + age
                if age > _MISSES * self._every:
                    known = known._replace(unchanged=unchanged, trouble=no_reply(state_of(pid)))
                elif known.unchanged:
                    known = known._replace(unchanged=unchanged)
                found[pid] = known
        return found

    def _add_returned(self, known: dict[int, StalledRank], pid: int, now: float) -> None:
        """Add that a rank runs on whose script has ended, unless its collectives make progress."""
        one = self._returned[pid]
        age, rank = now - one.at, known.get(pid)
        if rank is None:  # one that is not polled may be about to connect
            if age <= _MISSES * self._every:
                return
            rank = StalledRank(one.rank, one.local_rank, age)
        if rank.unchanged:
            known[pid] = rank._replace(unchanged=min(rank.unchanged, age), runs_on=one.runs_on)

    @property
    def error(self) -> str:
        """Why a rank cannot say how far it is, "" if each can."""
        if self._without_room:
            some = plural(self._without_room, "rank")
            return f"the progress of {some} of this host does not fit into a message."
        for one in self._ranks.values():
            if one.error:
                return f"the progress of rank {one.known.rank} is unknown: {one.error}."
        return ""

    # Where ranks are.

    def request_stacks(
        self, now: float, *, may_signal: bool
    ) -> tuple[CallsRequest, Mapping[str, int]]:
        """Return what will hold where ranks are, once it is over, and the request to send them."""
        self._requested += 1
        pids = [pid for pid, one in self._ranks.items() if one.is_connected]
        self._requests.append(CallsRequest(self._requested, pids, now, may_signal=may_signal))
        return self._requests[-1], {"stacks": self._requested}

    def signals_due(self, now: float) -> Mapping[int, int]:
        """Return the signals that ranks are to get now, by pid, to write where they are."""
        pids = {pid for request in self._requests for pid in request.signals_due(now)}
        # What has closed its connection would write to whatever has that descriptor now.
        there = [(pid, one) for pid, one in self._ranks.items() if pid in pids and one.is_connected]
        return {pid: one.signal for pid, one in there if one.signal}

    def requests_over(self, now: float) -> list[CallsRequest]:
        """Return, once, the requests to which all have replied that will."""
        over = [request for request in self._requests if request.is_over(now)]
        self._requests = [request for request in self._requests if request not in over]
        return over


class CallsRequest:
    """A request to ranks of this host, by pid, to say where they are; some may never do.

    `may_signal`: those that do not reply get the signal at which they write. `threads` are the
    replies.
    """

    def __init__(self, number: int, pids: Iterable[int], now: float, *, may_signal: bool) -> None:
        self.number = number
        self.threads: dict[int, Threads] = {}
        self._pids, self._may_signal = set(pids), may_signal
        self._written: dict[int, list[str]] = {}
        self._signal_at = now + _STACKS_SECONDS
        self._over_at = self._signal_at + _WRITE_SECONDS

    def wrote(self, pid: int, line: str) -> None:
        """Take in a line that a rank has written at a signal."""
        lines = self._written.setdefault(pid, [])
        if line.startswith("Stack "):  # it begins again, for somebody else
            lines.clear()
        elif len(lines) < MOST_CALLS:
            lines.append(line)

    def _missing(self) -> set[int]:
        return self._pids - set(self.threads)

    def due(self) -> float:
        """Return when `signals_due` or `is_over` is due."""
        return min(self._signal_at, self._over_at) if self._missing() else -math.inf

    def signals_due(self, now: float) -> set[int]:
        """Return, once, which ranks are to get the signal at which they write."""
        if now < self._signal_at:
            return set()
        self._signal_at = math.inf
        return self._missing() if self._may_signal else set()

    def is_over(self, now: float) -> bool:
        """Tell whether all have replied, or their time is over."""
        return now >= self._over_at or not self._missing()

    def calls(self, pid: int) -> Calls:
        """Return where a rank's main thread is, () if that is not known."""
        for name, calls in self.threads.get(pid, ()):
            if not name:
                return calls
        return calls_in(self._written.get(pid, ()))

    def text(self, pid: int, state: str) -> str:
        """Return a rank's stacks; `state` is the letter of its process's state (proc(5))."""
        if pid in self.threads:
            return text_of(self.threads[pid])
        if pid not in self._pids:
            return (
                "  no stack: torch.distributed is not imported yet (with --launcher-start warm: "
                "not used yet), the connection to the launcher is closed, or --launcher-watch is 0."
            )
        calls = self.calls(pid)
        lines = [f"  it {no_reply(state, may_signal=self._may_signal)}."]
        return "\n".join([*lines, text_of((("", calls),))] if calls else lines)


def no_reply(state: str, *, may_signal: bool = True) -> str:
    """Return why a rank's process does not reply, by the letter of its state (proc(5)).

    And how to see where it is, unless it `may_signal` that.
    """
    why = _WHY_SILENT.get(state, _HOLDS_LOCK)
    how = "; `sm-launch stacks` shows where, by sending it a signal" if why == _HOLDS_LOCK else ""
    return f"does not answer: {why}{'' if may_signal else how}"
