"""What a host records about its job: a line of events.jsonl for each decisive event. Pure.

`of_run` and `of_hosts` see each step of the two state machines and decide nothing. The journal
(host/journal.py) writes what they return; `sm-launch timeline` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from launcher.job.options import EVENTS_DIR, JOB_MARK
from launcher.peers import state as of_peers
from launcher.peers.events import Lost
from launcher.peers.messages import End, Failed, Start, Stop
from launcher.result.causes import Failure
from launcher.run import stops
from launcher.run.events import Actions, KeeperJoined, RankRuns, Report
from launcher.run.state import Done, Ending, Joining, State, Why
from launcher.text.words import Log, shortened, signal_name
from launcher.watch import judge, sentences

_LONGEST_CAUSE = 600  # characters
_STACK = "  main thread:"  # a line that only stacks in the log have

# The events, with their meanings on the page (docs/tables.py).
EVENTS: Mapping[str, str] = {
    "began": "the launcher has started; `job` is the job's name",
    "joined": "all hosts have joined",
    "attempt": "an attempt begins, on all hosts at the same time (except for network delay)",
    "started": "torchrun has started a rank, whose script is about to be started",
    "runs": "a rank's script is about to run",
    "failed": "a rank (or the host, if `rank` is null) has failed with `cause` and "
    "`exit_code`; for a hang that ends the job, this is the rank that the others "
    "were waiting for",
    "stalled": "the log reports that `ranks` have made no progress since `since`; `rank`, if "
    "known, is the one that they are waiting for",
    "stacks": "where all ranks were at a stall, as the log has it: `text`",
    "continued": "`ranks` that had stalled are making progress again, since `since`",
    "restart": "this attempt's ranks are being ended for a restart, because of `cause`",
    "stop": "the job is being stopped by `cause`, a signal: ranks have their grace to save",
    "ending": "this host's ranks are being ended, because the job has failed with `cause`",
    "saved": "a rank that handles the stop signal has ended by itself within its grace",
    "ended": "a rank's process has ended, with `exit_code` (again once that is known); or, if"
    " `rank` is null, this host's share of the job, with the job's `cause` and exit code",
    "lost": "the first host has lost `host`, which cannot report any more, because of `cause`",
}


class Note(NamedTuple):
    """One line, without the time of day. Unknown or inapplicable fields are null."""

    seconds: float
    host: str
    attempt: int
    rank: int | None = None
    event: str = ""
    cause: str = ""
    exit_code: int | None = None
    ranks: Sequence[int] = ()
    since: float | None = None
    job: str = ""
    text: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The line's fields, without the empty ones."""
        fields = self._asdict().items()
        return {key: one for key, one in fields if key == "rank" or one not in (None, "", ())}


# The fields of a line, `utc` included, with their meanings on the page.
FIELDS: Mapping[str, str] = {
    "utc": "the time of day by this host's clock, such as `2026-11-22T16:56:12.345Z`",
    "seconds": (
        "seconds since this launcher started, by a monotonic clock (each host has its own)"
    ),
    "host": "the host concerned: this one, except for `lost` and for ranks of other hosts",
    "attempt": "counted from 1; 0 until all hosts have joined",
    "rank": "the rank; null if the event concerns the host, or several ranks",
    "event": "one of the events below",
    "cause": "the reason, in one line; absent if there is none",
    "exit_code": "of a process (negative for a signal) or of the job; absent if unknown",
    "ranks": "several ranks; absent if there are none",
    "since": "when it began, as `seconds`; absent if that is now",
    "job": "the job's name; only in `began`",
    "text": "several lines: of `failed` the traceback, of `stacks` the stacks; absent if none",
}


def folder(environ: Mapping[str, str], log_dir: str) -> str:
    """Return the folder DIR of DIR/HOST/events.jsonl; "" for none, as under another launcher."""
    return "" if environ.get(JOB_MARK) else environ.get(EVENTS_DIR) or log_dir


def logs_folder(environ: Mapping[str, str], log_dir: str) -> str:
    """Return the folder DIR of ranks' logs; "" for none, as under another launcher."""
    return "" if environ.get(JOB_MARK) else log_dir


def began(state: State) -> list[Note]:
    """Return the first line."""
    return [Note(0.0, state.job.current_host, 0, None, "began", job=state.job.cluster.job_name)]


def of_run(before: State, event: Any, after: State, actions: Actions, now: float) -> list[Note]:
    """Return the lines for a step of this host's run (machine.py)."""
    at, host = round(now - after.times.began, 3), after.job.current_host
    note = Note(at, host, after.attempt)
    notes: list[Note] = []
    if isinstance(event, Start) and after.attempt != before.attempt:
        names = ["attempt"] if before.attempt else ["joined", "attempt"]
        notes += [note._replace(event=name) for name in names]
    elif isinstance(event, KeeperJoined):
        notes.append(note._replace(event="started", rank=event.rank))
    elif isinstance(event, RankRuns):
        notes.append(note._replace(event="runs", rank=event.rank))
    for action in actions:
        if isinstance(action, Report) and isinstance(action.message, Failed):
            notes.append(_failed(note, action.message.failure))
    notes += _of_ranks(before, after, note)
    return notes + _of_phase(before, event, after, actions, note)


def _failed(note: Note, failure: Failure) -> Note:
    rank = failure.rank if failure.rank >= 0 else None
    cause, _, text = failure.text.partition("\n")
    made = note._replace(event="failed", rank=rank, cause=_line(cause), text=text.strip("\n"))
    return made._replace(exit_code=failure.exit_code)


def _line(text: str) -> str:
    return shortened(text.partition("\n")[0].removeprefix("launcher: "), _LONGEST_CAUSE)


def _of_ranks(before: State, after: State, note: Note) -> list[Note]:
    """Return the lines for ended ranks, and for those that had saved at a stop."""
    if after.ranks is before.ranks:
        return []
    notes = []
    for number, rank in after.ranks.items():
        was = before.ranks.get(number)
        if rank.exit_code is None or (was and was.exit_code == rank.exit_code):
            continue
        note = note._replace(rank=rank.rank)
        phase = after.phase
        number = phase.number if isinstance(phase, Ending) and phase.why is Why.STOP else 0
        if number and stops.has_handled(rank, number):
            notes.append(note._replace(event="saved"))
        notes.append(note._replace(event="ended", exit_code=rank.exit_code))
    return notes


def _of_phase(before: State, event: Any, after: State, actions: Actions, note: Note) -> list[Note]:
    """Return the lines for the end of this host's ranks, and of its share of the job."""
    notes = []
    why, result = _why(after), after.result
    if why is not None and why is not _why(before):
        if why is Why.STOP and isinstance(after.phase, Ending):
            cause = signal_name(after.phase.number)
            notes.append(note._replace(event="stop", cause=cause))
        elif why is Why.RESTART and isinstance(event, End):
            notes.append(note._replace(event="restart", cause=_line(event.restart)))
        elif why is Why.FAILURE:
            notes.append(note._replace(event="ending", cause=_line(result.text if result else "")))
    elif isinstance(after.phase, Joining):
        for action in actions:  # no rank runs here that could be stopped
            if isinstance(action, Report) and isinstance(action.message, Stop):
                cause = signal_name(action.message.number)
                notes.append(note._replace(event="stop", cause=cause))
    if isinstance(after.phase, Done) and not isinstance(before.phase, Done) and result:
        stop = f"stopped by {signal_name(result.stop_signal)}" if result.stop_signal else ""
        cause, code = stop or _line(result.text), result.exit_code
        notes.append(note._replace(event="ended", cause=cause, exit_code=code))
    return notes


def _why(state: State) -> Why | None:
    return state.phase.why if isinstance(state.phase, Ending) else None


# Only the coordinator knows these.


def of_hosts(
    began: float, before: Any, event: Any, after: Any, actions: Actions, now: float
) -> list[Note]:
    """Return the lines for a step of the coordinator: logged stalls, lost hosts.

    `began` is when this launcher started.
    """
    if not isinstance(after, of_peers.JobState):
        return []  # a member's
    note = Note(round(now - began, 3), after.job.current_host, after.attempt)
    notes: list[Note] = []
    if isinstance(event, Lost) and not isinstance(before.phase, of_peers.Ended):
        notes.append(note._replace(event="lost", host=event.host, cause=event.why))
    lines = [action.line for action in actions if isinstance(action, Log)]
    if _STACK in lines:
        notes.append(note._replace(event="stacks", text="\n".join(lines)))
    if after.attempt != before.attempt or after.watch is before.watch:
        return notes
    were, are = _waiting(before.watch), _waiting(after.watch)
    for stall in before.watch.stalls:
        gone = _only_in(stall, were, are, lambda here, there: here < there)
        if gone:
            at = round(min(now, stall.progress_at) - began, 3)
            notes.append(note._replace(event="continued", ranks=gone, since=at))
    for stall in after.watch.stalls:
        new = _only_in(stall, are, were, lambda here, there: here > there)
        if new:
            cause = _line(sentences.line(stall.finding, now))
            one = _at_root(note, stall)._replace(event="stalled", cause=cause, ranks=new)
            notes.append(one._replace(since=round(stall.finding.since - began, 3)))
    if after.watch.hang and not before.watch.hang:
        for stall in after.watch.stalls:
            if sentences.line(stall.finding, now) == after.watch.hang.what:
                note = _at_root(note, stall)
        notes.append(_failed(note, after.watch.hang)._replace(rank=note.rank))
    return notes


def _waiting(watch: judge.Stalls) -> Mapping[int, float]:
    """Return since when ranks wait; if a rank is in two logged stalls, the later counts."""
    found: dict[int, float] = {}
    for stall in watch.stalls:
        for rank in _waiting_in(stall):
            found[rank] = max(stall.finding.since, found.get(rank, -math.inf))
    return found


def _only_in(
    stall: judge.Stall,
    here: Mapping[int, float],
    there: Mapping[int, float],
    is_other: Callable[[float, float], bool],
) -> list[int]:
    """Return the ranks that wait in a stall at one end of a step, but not at its other end.

    When more becomes known about a stall, its start may become earlier.
    """
    ranks = [rank for rank in _waiting_in(stall) if here[rank] == stall.finding.since]
    return [rank for rank in ranks if rank not in there or is_other(here[rank], there[rank])]


def _waiting_in(stall: judge.Stall) -> list[int]:
    """Return the ranks that wait in a logged stall without logged progress."""
    finding = stall.finding
    absent = () if finding.is_circle else finding.root
    return [rank for rank in sorted(finding.ranks) if stall.logged and rank not in absent]


def _at_root(note: Note, stall: judge.Stall) -> Note:
    """Return the line with the rank that the others wait for, if it is a single rank."""
    if len(stall.finding.root) != 1:
        return note
    (rank,) = stall.finding.root
    return note._replace(rank=rank, host=stall.finding.ranks[rank].host)
