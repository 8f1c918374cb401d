"""From lines of events.jsonl to what each rank did when, and the events. Pure.

Hosts' clocks differ. All hosts start an attempt at the same time, except for the network's delay:
so each host's seconds are shifted by the start of its own attempt. A host without an attempt is
placed by its time of day.
"""

# Without `from __future__ import annotations`: the fields of a line are read from annotations.

import collections
import datetime
import itertools
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from launcher.text.protocol import decoded
from launcher.text.wire import read
from launcher.text.words import plural, printable, signal_name

_MOST_SECONDS, _LONGEST = 1e9, 50_000  # of a text, in characters


class Kind(NamedTuple):
    """Something that a rank does for a while: how it is drawn, and what it means."""

    letter: str  # in the text
    light: str  # its colours on the page, on a light and on a dark screen
    dark: str
    meaning: str


# In the order of the legend.
KINDS: Mapping[str, Kind] = {
    "joining": Kind("j", "#b9c2cc", "#616d79", "the host waits until all hosts have joined"),
    "starting": Kind("-", "#8fbfe6", "#4d7ea8", "torchrun and the rank start, not yet the script"),
    "training": Kind("=", "#2f78b7", "#62a8e0", "the script runs"),
    "waiting": Kind("w", "#f0a202", "#f5b335", "the rank makes no progress, as the log reports"),
    "absent": Kind("a", "#2f78b7", "#62a8e0", "others wait for the rank, which makes no progress"),
    "saving": Kind("s", "#2e9e6b", "#4fc08d", "the job was stopped; the rank saved, and ended"),
    "stopping": Kind("t", "#9aa5b0", "#77838f", "the job was stopped; the rank has its grace"),
    "ending": Kind("x", "#d98880", "#b0615a", "the job has failed, and the rank is being stopped"),
    "restarting": Kind("r", "#a887d1", "#a387d0", "the rank is stopped, or waits to be restarted"),
    "ended": Kind(".", "#e4e8ec", "#2b343d", "the rank has ended; others have not"),
    "unknown": Kind(" ", "#fff", "#14191f", "the host has not started, or it is lost"),
}
# Events that are marked in a lane, with their letters in the text.
MARKS = {"failed": "X", "stalled": "!", "saved": "v", "stop": "S", "restart": "R", "lost": "L"}
_LISTED = (*MARKS, "stacks", "continued", "ended")
# What a rank does after an event; after some, only if its script runs, or is about to.
_BECOMES = {"began": "joining", "attempt": "starting", "runs": "training", "ended": "ended"}
_BECOMES |= {"restart": "restarting", "lost": "unknown"}
_ENDS = {"stop": "stopping", "ending": "ending"}
_STALLS = ("stalled", "continued")


class Line(NamedTuple):
    """A line of a file; its texts are printable."""

    utc: float  # seconds since 1970
    seconds: float
    host: str
    attempt: int
    event: str
    rank: Optional[int]
    cause: str = ""
    exit_code: Optional[int] = None
    ranks: tuple[int, ...] = ()
    since: float = -1.0  # -1: when it happened
    job: str = ""
    text: str = ""

    @property
    def words(self) -> str:
        """The cause and the exit code, which a failure's text may have."""
        code = "" if self.exit_code is None else f"exit code {self.exit_code}"
        code = "" if self.text.startswith(code) else code
        return f"{self.cause} ({code})" if self.cause and code else self.cause or code


class Bar(NamedTuple):
    """What a rank does for a while, in seconds since the job began."""

    kind: str
    start: float
    seconds: float
    attempt: int
    words: str


# Of a host's rank (of the host, if that is None): when an event has happened, and its number.
Marks = Mapping[tuple[str, Optional[int]], list[tuple[float, int]]]


class Event(NamedTuple):
    """An event, once, even if several hosts report it: `line` is the first report."""

    line: Line
    where: str  # the host, the rank, or all of them
    output: str = ""  # the file with its output

    @property
    def kind(self) -> str:
        """What has happened, as in events.jsonl; or `also failed`, or `unsaved`."""
        return self.line.event

    @property
    def summary(self) -> str:
        """Its words, after where it happened, if they do not say it themselves."""
        words = self.line.words
        if re.search(rf"(?<![\w.-]){re.escape(self.where)}(?![\w-]|\.\w)", words):
            return words
        return ": ".join(filter(None, [self.where, words]))


class Lane(NamedTuple):
    """One rank; None: a host without a known rank."""

    host: str
    rank: Optional[int]
    bars: Sequence[Bar]
    ended: str  # how its last process ended: `exit 1`, `SIGTERM`

    @property
    def name(self) -> str:
        """The host and the rank."""
        return self.host if self.rank is None else f"{self.host}, rank {self.rank}"


class Timeline(NamedTuple):
    """A job."""

    job: str
    how: str  # succeeded, failed, stopped, has not ended
    cause: str
    exit_code: Optional[int]
    seconds: float
    attempts: int
    hosts: Mapping[str, Sequence[Lane]]
    notes: Sequence[str]
    events: Sequence[Event]
    marks: Marks
    utc: float  # its start, in seconds since 1970

    @property
    def lanes(self) -> list[Lane]:
        """All lanes."""
        return [lane for lanes in self.hosts.values() for lane in lanes]

    @property
    def size(self) -> str:
        """The numbers of hosts and ranks."""
        ranks = sum(lane.rank is not None for lane in self.lanes)
        return f"{plural(len(self.hosts), 'host')}, {plural(ranks, 'rank')}"

    def clock(self, at: float, form: str = "%H:%M:%S") -> str:
        """Return the time of day (UTC) of a second of the job."""
        return time.strftime(form, time.gmtime(self.utc + at))

    def means(self) -> dict[str, float]:
        """Return a rank's average seconds of each kind that can be seen beside the others."""
        means = dict.fromkeys(KINDS, 0.0)
        for lane in self.lanes:
            for bar in lane.bars:
                means[bar.kind] += bar.seconds / len(self.lanes)
        return {kind: mean for kind, mean in means.items() if mean >= max(0.05, self.seconds / 100)}


def parsed(text: str) -> tuple[list[Line], int]:
    """Return the lines of a file's last job, and the number of the file's invalid lines."""
    lines: list[Line] = []
    bad = 0
    for row in filter(str.strip, text.split("\n")):
        try:
            line = _line(decoded(row.encode("utf-8", "surrogatepass")))
        except (ValueError, TypeError):
            bad += 1
            continue
        if line.event == "began":
            lines = []
        lines.append(line)
    return lines, bad


def _line(fields: Mapping[str, Any]) -> Line:
    """Return a line as its host has written it. Raises ValueError if it is not valid."""
    utc = datetime.datetime.strptime(f"{fields.get('utc')}+0000", "%Y-%m-%dT%H:%M:%S.%fZ%z")
    texts = {
        name: printable(text[:_LONGEST], keep="\n" if name == "text" else "")
        for name, text in fields.items()
        if isinstance(text, str)
    }
    line: Line = read(Line, {**fields, **texts, "utc": utc.timestamp()})
    if not (abs(line.seconds) < _MOST_SECONDS and abs(line.since) < _MOST_SECONDS):
        raise ValueError(line.seconds)
    if min((line.attempt, line.rank or 0, *line.ranks)) < 0:
        raise ValueError(line)
    return line


def in_order(names: Sequence[str]) -> list[str]:
    """Sort hosts as people do: algo-2 before algo-10."""
    return sorted(names, key=lambda name: [(len(p), p) for p in re.split("([0-9]+)", name)])


def aligned(logs: Mapping[str, Sequence[Line]]) -> tuple[list[Line], float]:
    """Return all hosts' lines in order, in seconds since the job's first one; and that one's UTC.

    No line is earlier than those before it in its file. `since` becomes the line's own time where
    it has none.
    """
    clocks = {name: lines[0].utc - lines[0].seconds for name, lines in logs.items()}
    starts = {
        name: {line.attempt: line.seconds for line in reversed(lines) if line.event == "attempt"}
        for name, lines in logs.items()
    }
    first = max(logs, key=lambda name: len(starts[name]))
    moved: list[Line] = []
    for name, lines in logs.items():
        both = starts[name].keys() & starts[first].keys()
        shift = clocks[name] - clocks[first]
        if both:
            shift = starts[first][min(both)] - starts[name][min(both)]
        latest = itertools.accumulate((line.seconds + shift for line in lines), max)
        for line, at in zip(lines, latest):
            since = at if line.since < 0 else line.since + shift
            moved.append(line._replace(seconds=at, since=since))
    moved.sort(key=lambda line: line.seconds)
    began = moved[0].seconds
    in_seconds = [
        line._replace(seconds=line.seconds - began, since=line.since - began) for line in moved
    ]
    return in_seconds, clocks[first] + began


def timeline(logs: Mapping[str, Sequence[Line]], notes: Sequence[str] = ()) -> Timeline:
    """Return the timeline of a job; if the files have several jobs, of the last one.

    `logs` are the lines of each host's file, at least one.
    """
    began = {name: lines[0] for name, lines in logs.items()}
    job = max(began.values(), key=lambda line: (bool(line.job), line.utc)).job
    old = {name: line.job for name, line in began.items() if line.job not in ("", job)}
    lines, utc = aligned({name: lines for name, lines in logs.items() if name not in old})
    end = lines[-1].seconds
    ends = [line for line in lines if line.event == "ended" and line.rank is None]
    last = max(ends, key=lambda line: (bool(line.exit_code), bool(line.cause)), default=None)
    events, marks = _events(lines)
    lanes = {}
    for name in in_order([name for name in logs if name not in old]):
        here = _known(name, lines, has_ended=bool(ends))
        ranks = {line.rank for line in here if line.host == name and line.rank is not None}
        rows: list[Optional[int]] = [*sorted(ranks)] or [None]
        lanes[name] = [_lane(name, rank, here, end) for rank in rows]
    return Timeline(
        job=job,
        how=_how(last),
        cause=last.cause if last else "",
        exit_code=last.exit_code if last else None,
        seconds=end,
        attempts=max(line.attempt for line in lines),
        hosts=lanes,
        notes=[*notes, *(f"{name}: its last job is {old[name]}, not this one" for name in old)],
        events=events,
        marks=marks,
        utc=utc,
    )


def _how(end: Optional[Line]) -> str:
    if end is None:
        return "has not ended"
    if end.exit_code == 0:
        return "succeeded"
    return "stopped" if end.cause.startswith("stopped by ") else "failed"


def _known(name: str, lines: Sequence[Line], *, has_ended: bool) -> list[Line]:
    """Return the lines about a host, until it was lost or its file ends, with a line that says so.

    A host that has recorded its own end was not lost. Stalls are those of all hosts' ranks.
    `has_ended`: the end of the job is known.
    """
    here = [line for line in lines if line.host == name or line.event in _STALLS]
    own = [line for line in here if line.host == name]
    lost = [line._replace(cause=f"lost: {line.cause}") for line in own if line.event == "lost"]
    if any(line.event == "ended" and line.rank is None for line in own):
        lost = []
    elif has_ended and not lost:
        lost = [own[-1]._replace(event="lost", cause="its file ends here", since=own[-1].seconds)]
    until = lost[0].seconds if lost else float("inf")
    here = [line for line in here if line.seconds <= until and line.event != "lost"]
    return here + [line._replace(rank=None, exit_code=None) for line in lost[:1]]


def _lane(host: str, rank: Optional[int], here: Sequence[Line], end: float) -> Lane:
    """Return a lane, from the lines about its host, and about stalls."""
    kind, stall, ended = "unknown", "", ""
    bars = [Bar(kind, 0.0, 0.0, 0, "not started")]
    for line in sorted(here, key=lambda line: line.since):
        if line.event not in _STALLS and line.rank not in (None, rank):
            continue
        kind, stall = _next(kind, line), _stall(stall, rank, line)
        if line.event == "saved" and kind == "stopping":
            kind = "saving"
            bars[-1] = bars[-1]._replace(kind=kind)
        elif line.event == "ended" and line.rank is not None and line.exit_code is not None:
            code = line.exit_code
            ended = f"exit {code}" if code >= 0 else signal_name(-code).split()[0]
        shown = stall if kind == "training" and stall else kind
        if shown != bars[-1].kind or line.event == "attempt":
            at = min(max(0.0, line.since), end)
            if stall:  # its bar's words do not say how long; those of later bars do not repeat it
                cause = line.cause.split(": ", 1)[-1] if line.event == "stalled" else ""
                line = line._replace(cause=cause)
            bars.append(Bar(shown, at, 0.0, line.attempt, line.words))
    stops = [*(bar.start for bar in bars[1:]), end]
    bars = [bar._replace(seconds=stop - bar.start) for bar, stop in zip(bars, stops)]
    return Lane(host, rank, [bar for bar in bars if bar.seconds > 0], ended)


def _stall(stall: str, rank: Optional[int], line: Line) -> str:
    """Return what a rank whose script runs does in a stall, after a line; "": there is none."""
    if line.event == "stalled" and rank is not None:
        return "waiting" if rank in line.ranks else "absent" if rank == line.rank else stall
    ends = line.event == "continued" and (rank in line.ranks or stall == "absent")
    return "" if ends or line.event == "attempt" else stall


def _next(kind: str, line: Line) -> str:
    """Return what a rank does after a line."""
    if line.event in _ENDS:
        return _ENDS[line.event] if kind in ("starting", "training") else kind
    if line.event == "ended" and kind == "restarting" and line.rank is not None:
        return kind
    return _BECOMES.get(line.event, kind)


def _events(lines: Sequence[Line]) -> tuple[list[Event], Marks]:
    """Return the events, those of several hosts or ranks once; and the marks."""
    hosts, ranks = len({line.host for line in lines}), len({line.rank for line in lines} - {None})
    same: dict[tuple[object, ...], list[Line]] = {}
    for line in _listed(lines):
        same.setdefault((line.event, line.attempt, line.cause), []).append(line)
    events: list[Event] = []
    marks: Marks = collections.defaultdict(list)
    for first, *others in same.values():
        for line in (first, *others):
            if line.event in MARKS:
                marks[line.host, line.rank].append((line.seconds, len(events)))
        where = plural(len(first.ranks), "rank") if first.ranks else first.host
        which, number = ("hosts", hosts) if first.rank is None else ("ranks", ranks)
        if first.rank is not None:
            where = f"{first.host}, rank {first.rank}"
        if first.event == "stacks":
            where = "all ranks"
        elif others and len(others) + 1 == number:
            where = f"all {which}"
        elif others:
            where += f" and {len(others)} more"
        shown = first._replace(cause="") if first.event == "ended" else first  # the head has it
        events.append(Event(shown, where))
    return events, marks


def _listed(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the lines that are listed, by time; a restart at or after the failure that it is for.

    Another host may have noted the restart a moment before that failure.
    """
    roots, saved = _roots(lines), {line.rank for line in lines if line.event == "saved"}
    stop = min((line.seconds for line in lines if line.event == "stop"), default=float("inf"))

    def placed(line: Line) -> Line:
        root = roots.get(line.attempt, line) if line.event == "restart" else line
        return line._replace(seconds=max(line.seconds, root.seconds))

    listed = map(placed, lines)
    for line in sorted(listed, key=lambda line: (line.seconds, line.event == "restart")):
        if line.event == "failed" and line.cause != roots[line.attempt].cause:
            yield line._replace(event="also failed")
        elif line.event == "ended" and line.rank is not None:
            code = line.exit_code or 0
            # Python ends by SIGINT after a KeyboardInterrupt, too, at which a script may save.
            was_killed = code < 0 and code != -signal.SIGINT and line.seconds >= stop
            if was_killed and line.rank not in saved:
                yield line._replace(event="unsaved", cause=signal_name(-code), exit_code=None)
        elif line.event in _LISTED:
            yield line


def _roots(lines: Sequence[Line]) -> dict[int, Line]:
    """Return, for each attempt, the failure that ended it: the one that the hosts name."""
    roots = {}
    for attempt in {line.attempt for line in lines if line.event == "failed"}:
        here = [line for line in lines if line.attempt == attempt]
        named = " ".join(line.cause for line in here if line.event in ("restart", *_ENDS, "ended"))
        failed = [line for line in here if line.event == "failed"]
        roots[attempt] = next((line for line in failed if line.cause[:100] in named), failed[0])
    return roots
