"""How a host watches its own ranks: it polls them every few seconds, and reports to the coordinator
when some make no progress for a while, and when they do again. When the coordinator requests it,
all are polled at once, also for their stacks.

While all ranks make progress, nothing is reported. This module sends nothing: it returns messages
and their receivers. But its objects keep state. Times are on the clock System.now(), waits in
seconds.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Callable

from launcher.text import wire
from launcher.watch import stacks
from launcher.watch.waits import ENDED, ENDS, CollectStacks, Group, NoProgressReport, StalledRank

_REPLY_SECONDS = 1.0  # for a rank to reply how far it is
_MOST_WRITTEN = 200  # lines of a crash and a stack
_MISSES = 2  # missed polls until a rank counts as silent: hosts may be busy
_REPORT_BYTES, _STACK_BYTES = 60_000, 6_000  # of a message, which may have 64 KiB; of a rank's
# For a rank to reply where it is; then to write it, at a signal.
_STACKS_SECONDS, _WRITE_SECONDS = 0.5, 1.0
_RUNS_ON_IN = "in a thread, a child process or an exit handler"  # until its replies say more
_IDLE = 0.02  # of a core; a waiting rank and its children use less
# By the letter of the process's state; otherwise its code holds Python's lock.
_WHY_SILENT = {
    "": "it has ended",
    "Z": "it has ended",
    "D": "it is blocked in the kernel",
    "T": "it is suspended (SIGSTOP)",
    "t": "it is stopped in a debugger",
}
_HOLDS_LOCK = "it is running code that holds Python's lock (the GIL)"


class _Rank:
    """A rank as its last reply has it; `known.unchanged` is 0 if it has made progress since."""

    def __init__(self, known: StalledRank, now: float) -> None:
        self.known, self.replied_at, self.poll = known, now, 0
        self.is_connected: bool | None = None  # None: not yet
        self.has_failed = False  # at the place in `known`
        self.signal = 0  # at which it writes where it is; 0: no signal
        self.threads: tuple[stacks.Thread, ...] = ()  # at its last reply
        self.written = deque[str](maxlen=_MOST_WRITTEN)  # by faulthandler
        self.returned_at = math.inf  # the end of its script
        # Before its first collective: where it is, since when, and the CPU seconds that it and all
        # below it had used then.
        self.still: tuple[Any, float, float] = ((), now, 0.0)

    @property
    def calls(self) -> stacks.Calls:
        """Where its main thread is, () if unknown."""
        return self.threads[0].calls if self.threads else stacks.written_in(self.written)

    def at(self, now: float, every: float, code: int | None, state: str) -> StalledRank | None:
        """Return its progress, None if unknown, by its process's exit code or state (proc(5))."""
        known, age, ran_on = self.known, now - self.replied_at, now - self.returned_at
        has_returned, misses = ran_on >= 0, _MISSES * every
        if code == 0:
            return known.without_waits(ENDED)._replace(unchanged=age)
        if code is not None or self.has_failed:
            return known
        if not self.is_connected:
            if has_returned and ran_on > misses:  # before, it may be about to end
                return known._replace(unchanged=ran_on, trouble="", groups=(), runs_on=True)
            if has_returned or self.is_connected is False:
                return None
            return known._replace(unchanged=age)
        if age > misses:
            known = known._replace(trouble=no_reply(state))
        elif not known.unchanged:  # after progress it replies without its groups
            return known._replace(has_more=known.has_more or not known.groups)
        unchanged = min(known.unchanged + age, ran_on if has_returned else math.inf)
        return known._replace(unchanged=unchanged, runs_on=has_returned)


class Watch:
    """The state of this host's ranks in an `attempt`, by pid. With `every` 0 none is polled.

    cpu_of(pid) returns the CPU seconds of a process and its children.
    """

    def __init__(
        self, every: float, notify: float, cpu_of: Callable[[int], float], attempt: int = 0
    ) -> None:
        self._every, self._reported_from, self._cpu_of = every, notify / 2, cpu_of
        self._attempt = attempt
        self._ranks: dict[int, _Rank] = {}
        self._polls, self._poll_at, self._replies_until = 0, math.inf, math.inf
        self._reported: Any = ((), 0)  # last, without times
        # A poll for stacks: the commands that it is for, and when ranks get a signal.
        self._wanted: list[CollectStacks] = []
        self._may_signal, self._signal_at = False, math.inf

    # Reports of ranks.

    def _of(self, pid: int) -> _Rank:
        """Return a rank; for one of an earlier attempt, an object that is dropped."""
        return self._ranks.get(pid) or _Rank(StalledRank(-1, -1, 0), -math.inf)

    def started(self, pid: int, rank: int, local_rank: int, now: float) -> None:
        """Add a rank, which cannot be polled yet."""
        self._ranks[pid] = _Rank(StalledRank(rank, local_rank, 0), now)
        if self._every:
            self._poll_at = min(self._poll_at, now + self._every)

    def connected(self, pid: int, number: int, now: float) -> None:
        """Note that a rank can be polled; at signal `number` it writes where it is."""
        rank = self._of(pid)
        rank.is_connected, rank.signal, rank.replied_at = True, number, now

    def script_ended(self, pid: int, now: float) -> None:
        """Note that a rank's script has ended."""
        rank = self._of(pid)
        rank.returned_at = now
        rank.known = rank.known._replace(place=_RUNS_ON_IN, is_still=False)

    def replied(self, pid: int, fields: Mapping[str, Any], now: float) -> None:
        """Handle a rank's reply. Raises ValueError, and changes nothing, if it is not valid."""
        rank = self._of(pid)
        if fields["poll"] != self._polls:
            return  # it is too late
        numbers = {"rank": rank.known.rank, "local_rank": rank.known.local_rank}
        known = wire.read(StalledRank, {"unchanged": 0, **fields, **numbers})
        # No longer than by our clock, which stands still while all are suspended.
        most = rank.known.unchanged + now - rank.replied_at
        known = known._replace(unchanged=min(known.unchanged, most))
        sent = wire.read(tuple[tuple[str, tuple[str, ...], bool], ...], fields.get("threads", []))
        rank.signal = wire.read(int, fields.get("signal", rank.signal))
        rank.replied_at, rank.poll, rank.threads = now, self._polls, stacks.threads_of(sent)
        rank.written.clear()
        place = stacks.place(rank.calls)
        if rank.returned_at < math.inf:  # Python's own wait for a thread is no useful place
            place = stacks.kept_by(rank.threads, str(fields.get("child", "")))
        known = known._replace(place=place, fact=known.fact or str(fields.get("handles", "")))
        if fields.get("ends"):
            trouble = f"{ENDS}{stacks.in_place(rank.calls)}"
            known = known._replace(groups=rank.known.groups).without_waits(trouble)
        elif "fact" in fields and rank.calls:
            known = self._if_still(pid, rank, known, now)
        if not rank.has_failed:
            rank.known = known

    def _if_still(self, pid: int, rank: _Rank, known: StalledRank, now: float) -> StalledRank:
        """Return a rank without a collective, with the place where it has stood still, if any."""
        calls, (place, since, used) = rank.calls, rank.still
        here = calls[:-1], calls[-1].function  # a waiting loop may be at any of its lines
        cpu = self._cpu_of(pid)
        if here != place or cpu - used > _IDLE * (now - since):
            rank.still = here, since, used = here, now, cpu
        if now - since < self._reported_from:
            return known
        unchanged = min(known.unchanged, now - since)
        return known._replace(place=stacks.still_in(calls), is_still=True, unchanged=unchanged)

    def failed(self, pid: int, fields: Any) -> None:
        """Note the groups of a failing rank, which it sends with its reason."""
        rank = self._of(pid)
        try:
            groups = wire.read(tuple[Group, ...], fields)
        except ValueError:  # none, or those of an unknown version of torch
            return
        if groups:
            rank.known, rank.has_failed = rank.known._replace(groups=groups), True

    def wrote(self, pid: int, line: str) -> None:
        """Note a line that a rank has written at its signal, or at a crash."""
        self._of(pid).written.append(line)

    def crash(self, pid: int, number: int) -> stacks.Calls:
        """Return where a rank was when a signal ended it, () if unknown."""
        return stacks.crash_in("\n".join(self._of(pid).written), number)

    def disconnected(self, pid: int) -> None:
        """Note that a rank can no longer be polled: it has ended, or continues without us."""
        self._of(pid).is_connected = False

    # What is due.

    def due(self) -> float:
        """Return when something is due; infinite: never, as for ranks that cannot be polled."""
        if not self._wanted:
            return min(self._poll_at, self._replies_until)
        return min(self._replies_until, self._signal_at) if self._missing() else -math.inf

    def poll(self, now: float) -> Mapping[str, Any] | None:
        """Return the request to send to all ranks, if a poll is due."""
        if now < self._poll_at or self._wanted:
            return None
        self._polls += 1
        self._poll_at = now + self._every
        self._replies_until = now + min(_REPLY_SECONDS, self._every / 2)
        return {"poll": self._polls}

    def request_stacks(self, wanted: CollectStacks, now: float) -> Mapping[str, Any]:
        """Return the request to send to all ranks for the report of its number.

        Those that do not reply get the signal at which they write where they are, if they may.
        """
        self._wanted.append(wanted)
        self._may_signal = any(one.may_signal for one in self._wanted)
        self._polls += 1
        for rank in self._ranks.values():
            rank.threads = ()
            rank.written.clear()
        self._signal_at = now + _STACKS_SECONDS
        self._replies_until = self._signal_at + _WRITE_SECONDS
        return {"poll": self._polls, "stacks": True}

    def _missing(self) -> set[int]:
        ranks = self._ranks.items()
        return {pid for pid, rank in ranks if rank.is_connected and rank.poll != self._polls}

    def signals_due(self, now: float) -> Mapping[int, int]:
        """Return, once, the signals that ranks are to get now, by pid, to write where they are."""
        if now < self._signal_at:
            return {}
        self._signal_at = math.inf
        # A rank that has closed its connection would write to the descriptor's new file.
        there = {pid: self._ranks[pid].signal for pid in self._missing()}
        return {pid: number for pid, number in there.items() if number and self._may_signal}

    def reports(
        self,
        ranks: Mapping[int, int | None],
        state_of: Callable[[int], str],
        now: float,
        oom: str = "",
    ) -> list[NoProgressReport]:
        """Return the report after a poll, if it is new or was requested.

        `ranks` are the pids of those that have started, with their exit codes, if they have ended;
        state_of(pid) is a letter as in proc(5); `oom` is an out-of-memory kill on this host: of a
        rank's child perhaps, for which it waits.
        """
        if now < self._replies_until and (self._missing() or not self._wanted):
            return []
        self._replies_until = self._signal_at = math.inf
        wanted, self._wanted = self._wanted, []
        found = dict[int, StalledRank]()
        for pid, rank in self._ranks.items():
            known = rank.at(now, self._every, ranks.get(pid), state_of(pid))
            if known and (wanted or known.unchanged >= self._reported_from):
                found[pid] = known._replace(fact=known.fact or oom)
        running = [pid for pid, code in ranks.items() if code is None]
        idle = {pid for pid, known in found.items() if known.runs_on or known.waits}
        report = NoProgressReport(
            self._attempt, tuple(found.values()), others=len({*running} - idle)
        )
        if not wanted:
            timeless = tuple(known._replace(unchanged=0) for known in report.ranks)
            before, self._reported = self._reported, (timeless, report.others if timeless else 0)
            return [] if self._reported == before else [report]
        self._reported = None  # what is reported next is new
        room = (_REPORT_BYTES - len(json.dumps(report.ranks))) // max(1, len(running))
        texts = [
            (self._ranks[pid].known.rank, self.text(pid, state_of(pid), min(room, _STACK_BYTES)))
            for pid in running
        ]
        return [report._replace(number=one.number, stacks=tuple(texts)) for one in wanted]

    # Where ranks are.

    def place(self, pid: int) -> str:
        """Return where a rank is, by the last poll for stacks; "" if unknown."""
        return stacks.place(self._ranks[pid].calls)

    def text(self, pid: int, state: str, room: int = _STACK_BYTES) -> str:
        """Return a rank's stacks; `state` is the letter of its process's state (proc(5))."""
        rank, why = self._ranks[pid], ""
        if not rank.is_connected:
            why = (
                "  no stack: torch.distributed is not imported, the connection to the launcher "
                "is closed, or --launcher-watch is 0."
            )
        elif rank.poll != self._polls:
            why = f"  it {no_reply(state, with_advice=not self._may_signal)}."
        threads = rank.threads or [stacks.Thread("", rank.calls)]
        room -= len(why)
        return "\n".join(filter(None, (why * (room > 0), stacks.text_of(threads, room))))


def no_reply(state: str, *, with_advice: bool = False) -> str:
    """Return why a rank's process does not reply, by the letter of its state (proc(5))."""
    why = _WHY_SILENT.get(state, _HOLDS_LOCK)
    how = "; `sm-launch stacks` shows where, by sending it a signal"
    return f"does not answer: {why}{how if with_advice and why == _HOLDS_LOCK else ''}"
