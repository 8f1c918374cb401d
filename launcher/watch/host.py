"""How a host watches its own ranks: it polls them every few seconds, and reports to the coordinator
when some make no progress for a while, and when they do again. When the coordinator requests it,
all are polled at once, also for their stacks.

While all ranks make progress, nothing is reported. This module sends nothing: it returns messages
and their receivers. But its objects keep state. Times are on the clock time.monotonic(), waits in
seconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Callable

from launcher.text.words import plural, printable
from launcher.watch.overview import NoProgressReport
from launcher.watch.progress import (
    ENDED,
    ENDS,
    REPORT_BYTES,
    StalledRank,
    bounded,
    groups_of,
    size_of,
)
from launcher.watch.stacks import (
    AT_EXIT,
    MOST_CALLS,
    Calls,
    Threads,
    calls_in,
    grouped,
    in_place,
    kept_by,
    place,
    still_in,
    text_of,
    threads_of,
)

_REPLY_SECONDS = 1.0  # for a rank to reply how far it is
_MISSES = 2  # missed polls until a rank counts as silent: hosts may be busy
_LONGEST_TEXT = 200  # characters
# For a rank to reply where it is; then to write it, at a signal.
_STACKS_SECONDS, _WRITE_SECONDS = 0.5, 1.0
_IDLE = 0.02  # of a core; a waiting rank and its children use less
# By the letter of the process's state; otherwise its code holds Python's lock.
_WHY_SILENT = {
    "D": "it is blocked in the kernel",
    "T": "it is suspended (SIGSTOP)",
    "t": "it is stopped in a debugger",
    "Z": "it has ended",
    "": "it has ended",
}
_HOLDS_LOCK = "it is running code that holds Python's lock (the GIL)"


class _Rank:
    """The state of a rank: `known.unchanged` is 0 if its last reply reported progress."""

    def __init__(self, known: StalledRank, now: float) -> None:
        self.known, self.replied_at, self.poll = known, now, 0
        self.is_connected: bool | None = None  # None: not yet
        self.has_failed = False  # at the place in `known`
        self.error = ""  # why it cannot report its progress
        self.signal = 0  # at which it writes where it is; 0: no signal
        self.threads: Threads = ()  # at its last reply
        self.written: list[str] = []  # at its signal
        self.returned_at, self.runs_on = math.inf, AT_EXIT  # its script's end; what keeps it alive
        # Before its first collective: where it is, and since when; and how many CPU seconds it and
        # all below it had used at a later time.
        self.still: tuple[Calls, float] = ((), now)
        self.used: tuple[float, float] | None = None

    @property
    def calls(self) -> Calls:
        """Where its main thread is, () if unknown."""
        for name, calls in self.threads:
            if not name:
                return calls
        return calls_in(self.written)

    def at(self, now: float, every: float, why_silent: Callable[[], str]) -> StalledRank | None:
        """Return its progress, None if unknown."""
        known, age, ran_on = self.known, now - self.replied_at, now - self.returned_at
        if self.is_connected and age > _MISSES * every:
            known = known._replace(trouble=no_reply(why_silent()))
        elif self.is_connected and not known.unchanged:
            return known
        known = known._replace(unchanged=known.unchanged + age)
        if self.returned_at == math.inf:
            return None if self.is_connected is False else known
        if self.is_connected:
            return known._replace(unchanged=min(known.unchanged, ran_on), runs_on=self.runs_on)
        if ran_on <= _MISSES * every:
            return None  # it may be about to connect
        return StalledRank(known.rank, known.local_rank, ran_on, runs_on=self.runs_on)


class Watch:
    """The state of this host's ranks in an `attempt`, by pid. With `every` 0 none is polled.

    cpu_of(pid) returns the CPU seconds of a process and its children.
    """

    def __init__(
        self,
        every: float,
        notify: float,
        cpu_of: Callable[[int], float] = lambda pid: 0.0,
        attempt: int = 0,
    ) -> None:
        self._every, self._reported_from, self._cpu_of = every, notify / 2, cpu_of
        self._ranks: dict[int, _Rank] = {}
        self._polls, self._poll_at, self._replies_until = 0, math.inf, math.inf
        self._report = NoProgressReport(attempt, (), 0)  # the last report, without times
        self._without_room = 0  # ranks whose groups do not fit into a message
        # A poll for stacks: the numbers of those who want them, and when ranks get a signal.
        self._wanted: list[int] = []
        self._may_signal, self._signal_at = False, math.inf

    # Reports of ranks.

    def started(self, pid: int, rank: int, local_rank: int, now: float) -> None:
        """Add a rank, which cannot be polled yet."""
        self._ranks[pid] = _Rank(StalledRank(rank, local_rank, 0), now)
        if self._every:
            self._poll_at = min(self._poll_at, now + self._every)

    def connected(self, pid: int, number: int, now: float) -> None:
        """Note that a rank can be polled; at signal `number` it writes where it is."""
        if pid in self._ranks:
            one = self._ranks[pid]
            one.is_connected, one.signal, one.replied_at = True, number, now

    def script_ended(self, pid: int, now: float) -> None:
        """Note that a rank's script has ended."""
        if pid in self._ranks:
            self._ranks[pid].returned_at = now

    def replied(self, pid: int, fields: Mapping[str, Any], now: float) -> None:
        """Handle a rank's reply. Raises one of several errors if it is not valid."""
        if pid not in self._ranks or fields["poll"] != self._polls:
            return  # it is too late
        one, calls = self._ranks[pid], Calls()
        one.signal = int(fields.get("signal", one.signal))
        one.error = str(fields.get("error", ""))[:_LONGEST_TEXT]
        known = StalledRank(one.known.rank, one.known.local_rank, 0)
        if "threads" in fields:
            one.threads = threads_of(fields["threads"])
            calls = one.calls
        if "kept" in fields and one.returned_at < math.inf:
            keep = one.threads[1 : 1 + fields["kept"]]  # after the main one
            one.runs_on = kept_by(calls, keep, fields["child"])
        if "unchanged" in fields:
            unchanged = float(fields["unchanged"])
            if fields.get("ends"):
                known = one.known.without_waits(f"{ENDS}{in_place(calls)}")
                known = known._replace(unchanged=unchanged)
            else:
                # Python's own wait for a thread is no useful place.
                where = place(calls) if one.returned_at == math.inf else ""
                note = printable(str(fields.get("note", "")))[:_LONGEST_TEXT]
                groups = groups_of(fields["groups"])
                known = known._replace(unchanged=unchanged, place=where, groups=groups, note=note)
        one.replied_at, one.poll = now, self._polls
        if one.has_failed:
            return
        one.known = known
        self._note_still(pid, one, calls if fields.get("before") else (), now)

    def _note_still(self, pid: int, one: _Rank, calls: Calls, now: float) -> None:
        """Note whether a rank without a collective is where it was at the previous poll."""
        was, since = one.still
        # A waiting loop may be at any of its lines.
        if not calls or calls[:-1] != was[:-1] or calls[-1].function != was[-1].function:
            one.still, one.used = (calls, now), None
        elif one.used is None:
            one.used = self._cpu_of(pid), now
        elif self._cpu_of(pid) - one.used[0] > _IDLE * (now - one.used[1]):
            one.still, one.used = (calls, now), None
        elif now - since >= self._reported_from:
            unchanged = min(one.known.unchanged, now - since)
            one.known = one.known._replace(silent=still_in(calls), unchanged=unchanged)

    def failed(self, pid: int, fields: Any) -> None:
        """Note the groups of a failing rank, which it sends with its reason."""
        if pid in self._ranks and fields:
            one = self._ranks[pid]
            one.known, one.has_failed = one.known._replace(groups=groups_of(fields)), True

    def wrote(self, pid: int, line: str) -> None:
        """Note a line that a rank has written at its signal."""
        if pid in self._ranks:
            lines = self._ranks[pid].written
            if line.startswith("Stack "):  # it begins again, for another request
                lines.clear()
            elif len(lines) < MOST_CALLS:
                lines.append(line)

    def disconnected(self, pid: int) -> None:
        """Note that a rank cannot be polled any more: it has ended, or continues without us."""
        if pid in self._ranks:
            self._ranks[pid].is_connected = False

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

    def request_stacks(self, number: int, now: float, *, may_signal: bool) -> Mapping[str, Any]:
        """Return the request to send to all ranks for the report of this number.

        Those that do not reply get the signal at which they write where they are, if `may_signal`.
        """
        self._wanted.append(number)
        self._may_signal = may_signal or (self._may_signal and len(self._wanted) > 1)
        self._polls += 1
        for one in self._ranks.values():
            one.threads, one.written = (), []
        self._signal_at = now + _STACKS_SECONDS
        self._replies_until = self._signal_at + _WRITE_SECONDS
        return {"poll": self._polls, "stacks": True}

    def _missing(self) -> set[int]:
        ranks = self._ranks.items()
        return {pid for pid, one in ranks if one.is_connected and one.poll != self._polls}

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
    ) -> list[NoProgressReport]:
        """Return the report after a poll, if it is new or was requested.

        `ranks` are the pids of those that have started, with their exit codes, if they have ended;
        state_of(pid) is a letter as in proc(5).
        """
        if now < self._replies_until and (self._missing() or not self._wanted):
            return []
        self._replies_until = self._signal_at = math.inf
        known = self._known(ranks, state_of, now)
        found = known
        if not self._wanted:
            found = {pid: one for pid, one in known.items() if one.unchanged >= self._reported_from}
        shown = bounded(found.values(), REPORT_BYTES)
        self._without_room = len(found) - len(shown)
        idle = {one.rank for one in shown if one.runs_on or one.waits}
        running = [pid for pid, code in ranks.items() if code is None]
        others = sum(pid not in known or known[pid].rank not in idle for pid in running)
        report = self._report._replace(ranks=shown, others=others)
        timeless = tuple(one._replace(unchanged=0) for one in shown)
        before = self._report
        self._report = report._replace(ranks=timeless, others=others if shown else 0)
        wanted, self._wanted = self._wanted, []
        if not wanted:
            return [] if self._report == before else [report]
        texts = {pid: self.text(pid, state_of(pid)) for pid in running}
        by_rank = {self._ranks[pid].known.rank: text for pid, text in texts.items()}
        stacks = grouped(by_rank, REPORT_BYTES - size_of(shown))
        return [report._replace(number=number, stacks=stacks) for number in wanted]

    def _known(
        self, ranks: Mapping[int, int | None], state_of: Callable[[int], str], now: float
    ) -> dict[int, StalledRank]:
        found = {}
        for pid, one in self._ranks.items():
            code = ranks.get(pid)
            if code == 0:
                ended = one.known.without_waits(ENDED)
                found[pid] = ended._replace(unchanged=now - one.replied_at)
            elif code is not None or one.has_failed:
                found[pid] = one.known
            elif known := one.at(now, self._every, functools.partial(state_of, pid)):
                found[pid] = known
        return found

    @property
    def error(self) -> str:
        """Why a rank cannot report its progress, "" if all can."""
        if self._without_room:
            some = plural(self._without_room, "rank")
            return f"the progress of {some} of this host does not fit into a message."
        for one in self._ranks.values():
            if one.error:
                return f"the progress of rank {one.known.rank} is unknown: {one.error}."
        return ""

    # Where ranks are.

    def place(self, pid: int) -> str:
        """Return where a rank is, by the last poll for stacks; "" if unknown."""
        return place(self._ranks[pid].calls)

    def text(self, pid: int, state: str) -> str:
        """Return a rank's stacks; `state` is the letter of its process's state (proc(5))."""
        one = self._ranks[pid]
        if not one.is_connected:
            return (
                "  no stack: torch.distributed is not imported yet (with --launcher-start warm: "
                "not used yet), the connection to the launcher is closed, or --launcher-watch is 0."
            )
        if one.poll == self._polls:
            return text_of(one.threads)
        lines = [f"  it {no_reply(state, may_signal=self._may_signal)}."]
        return "\n".join([*lines, text_of((("", one.calls),))] if one.calls else lines)


def no_reply(state: str, *, may_signal: bool = True) -> str:
    """Return why a rank's process does not reply, by the letter of its state (proc(5)).

    With advice how to see where it is, unless `may_signal`.
    """
    why = _WHY_SILENT.get(state, _HOLDS_LOCK)
    how = "; `sm-launch stacks` shows where, by sending it a signal" if why == _HOLDS_LOCK else ""
    return f"does not answer: {why}{'' if may_signal else how}"
