"""From lines of events.jsonl to what each rank did when, and the events. Pure.

Hosts' clocks differ. All hosts start an attempt at the same time, except for the network's delay:
so each host's seconds are shifted by the start of its own attempt. A host without an attempt is
placed by its time of day.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launcher.text.words import printable, signal_name

_MOST_SECONDS = 1e9
# What a rank does, in the order of the legend.
KINDS: Mapping[str, str] = {
    "joining": "the host waits until all hosts have joined",
    "start": "torchrun and the rank are starting; the script does not run yet",
    "training": "the script runs",
    "waiting": "the rank makes no progress, as the log reports",
    "saving": "the job was stopped, and the rank has its grace to save",
    "ending": "the job has failed, and the rank is being stopped",
    "restart": "the rank is being stopped, or waits to be restarted",
    "ended": "the rank has ended; others have not",
    "unknown": "nothing is known about the host: it has not started, or it is lost",
}
_RUNS = ("start", "training")
MARKS = ("failed", "stalled", "saved", "stop", "restart", "lost")
_HAPPENED = (*MARKS, "stacks", "continued", "ended")  # events in the list
_LONGEST_TEXT = 50_000  # characters


class Line(NamedTuple):
    """A line, checked."""

    event: str
    seconds: float
    host: str
    attempt: int
    rank: int | None
    cause: str
    exit_code: int | None
    ranks: tuple[int, ...]
    since: float
    job: str
    text: str  # several lines
    utc: float  # 0: unknown


class Bar(NamedTuple):
    """What a rank does for a while, in seconds since the job began."""

    kind: str
    start: float
    seconds: float
    attempt: int
    words: str


class Mark(NamedTuple):
    """An event at one time."""

    kind: str
    at: float
    words: str


class Event(NamedTuple):
    """An event, once, even if several hosts report it: `where` is the first of them, or a rank."""

    kind: str
    at: float
    host: str
    where: str
    words: str
    text: str  # a traceback, or stacks
    files: Sequence[str]  # where its output may be, below the folder
    is_root: bool  # the failure that ended its attempt


class Lane(NamedTuple):
    """One rank; None: a host without a known rank."""

    rank: int | None
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    ended: str = ""  # how its last process ended: `exit 1`, `SIGTERM`


class Host(NamedTuple):
    """A host, with the events of all of its ranks."""

    name: str
    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]


class Timeline(NamedTuple):
    """A job."""

    job: str
    how: str  # succeeded, failed, stopped, has not ended
    cause: str
    exit_code: int | None
    seconds: float
    attempts: int
    hosts: tuple[Host, ...]
    notes: tuple[str, ...]
    events: tuple[Event, ...]
    utc: float  # its start, in seconds since 1970; 0: unknown

    @property
    def lanes(self) -> list[Lane]:
        """All lanes."""
        return [lane for host in self.hosts for lane in host.lanes]

    def means(self) -> dict[str, float]:
        """Return a rank's average seconds of each kind."""
        lanes = self.lanes
        bars = [bar for lane in lanes for bar in lane.bars]
        sums = {kind: sum(bar.seconds for bar in bars if bar.kind == kind) for kind in KINDS}
        return {kind: seconds / max(1, len(lanes)) for kind, seconds in sums.items()}


# Lines.


def parsed(text: str) -> tuple[list[Line], int]:
    """Return the lines of a file's last job, and the number of the file's invalid lines."""
    lines: list[Line] = []
    bad = 0
    for row in text.split("\n"):
        if not row.strip():
            continue
        try:
            line = _line(json.loads(row))
        except (ValueError, TypeError, KeyError, RecursionError):
            bad += 1
            continue
        if line.event == "began":
            lines = []
        lines.append(line)
    return lines, bad


def _line(value: Any) -> Line:
    """Check a line. Raises ValueError, TypeError or KeyError."""
    seconds = _number(value["seconds"])
    rank, code = value["rank"], value.get("exit_code")
    return Line(
        event=_text(value["event"]),
        seconds=seconds,
        host=_text(value["host"]),
        attempt=_whole(value["attempt"]),
        rank=None if rank is None else _whole(rank),
        cause=_text(value.get("cause", "")),
        exit_code=code if isinstance(code, int) and abs(code) < 1024 else None,
        ranks=tuple(_whole(one) for one in value.get("ranks", ())),
        since=_number(value.get("since", seconds)),
        job=_text(value.get("job", "")),
        text=printable(str(value.get("text", ""))[:_LONGEST_TEXT], keep="\n"),
        utc=_utc(value.get("utc")),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return printable(value[:2000])


def _number(value: Any) -> float:
    if isinstance(value, bool) or not -_MOST_SECONDS < value < _MOST_SECONDS:
        raise ValueError(value)
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(value)
    return int(value)


def _utc(value: Any) -> float:
    try:
        return datetime.datetime.strptime(f"{value}+0000", "%Y-%m-%dT%H:%M:%S.%fZ%z").timestamp()
    except ValueError:
        return 0.0


def in_order(names: Sequence[str]) -> list[str]:
    """Sort hosts as people do: algo-2 before algo-10."""

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in _parts(name)]

    return sorted(names, key=key)


def _parts(name: str) -> list[str]:
    return re.findall(r"[0-9]{1,18}|[^0-9]+|[0-9]+", name)


# One clock.


def aligned(logs: Mapping[str, Sequence[Line]]) -> tuple[dict[str, list[Line]], float]:
    """Return each host's lines in seconds since the job's first line, in order; and its UTC."""
    names = in_order([name for name, lines in logs.items() if lines])
    if not names:
        return {}, 0.0
    starts = {
        name: {one.attempt: one.seconds for one in reversed(logs[name]) if one.event == "attempt"}
        for name in names
    }
    first = max(names, key=lambda name: len(starts[name]))
    clocks = {name: _clock(logs[name]) for name in names}
    moved = {}
    for name in names:
        both = starts[name].keys() & starts[first].keys()
        shift = clocks[name] - clocks[first] if clocks[name] and clocks[first] else 0.0
        if both:
            shift = starts[first][min(both)] - starts[name][min(both)]
        latest = itertools.accumulate((one.seconds + shift for one in logs[name]), max)
        moved[name] = [
            one._replace(seconds=at, since=one.since + shift) for one, at in zip(logs[name], latest)
        ]
    began = min(lines[0].seconds for lines in moved.values())
    utc = clocks[first] + began if clocks[first] else 0.0
    return {
        name: [one._replace(seconds=one.seconds - began, since=one.since - began) for one in lines]
        for name, lines in moved.items()
    }, utc


def _clock(lines: Sequence[Line]) -> float:
    """Return the time of day at a launcher's start; 0 if unknown."""
    return next((one.utc - one.seconds for one in lines if one.utc), 0.0)


# Lanes.


class _Said(NamedTuple):
    """The first host's reports about others: stalls of ranks, and lost hosts."""

    stalls: Mapping[int, Sequence[tuple[float, float, str]]]
    lost: Mapping[str, tuple[float, str]]


def timeline(logs: Mapping[str, Sequence[Line]], notes: Sequence[str] = ()) -> Timeline:
    """Return the timeline of a job; if the files have several jobs, of the last one."""
    began = {name: lines[0] for name, lines in logs.items() if lines and lines[0].job}
    job = max(began.values(), key=lambda line: line.utc).job if began else ""
    others = [name for name, line in began.items() if line.job != job]
    notes = [
        *notes,
        *(f"{name}: its last job is {began[name].job}, not this one" for name in others),
    ]
    hosts, utc = aligned({name: lines for name, lines in logs.items() if name not in others})
    everything = [one for lines in hosts.values() for one in lines]
    end = max((one.seconds for one in everything), default=0.0)
    ends = [one for one in everything if _is_end(one)]
    said, roots = _said(hosts, end), _roots(everything)
    marked = [
        one for one in everything if one.event in MARKS and (one.event != "failed" or one in roots)
    ]
    found = []
    for name, lines in hosts.items():
        ranks = {one.rank for one in lines if one.rank is not None and one.host == name}
        gone = _gone_at(name, lines, said, has_ended=bool(ends), end=end)
        marks = [(one.rank, _mark(one)) for one in marked if one.host == name]
        lanes = tuple(
            _lane(name, rank, lines, said, gone, end)._replace(marks=_of(rank, marks))
            for rank in sorted(ranks)
        )
        lanes = lanes or (_lane(name, None, lines, said, gone, end),)
        found.append(Host(name, lanes, _of(None, marks)))
    how, last = _how(ends)
    attempts = max((one.attempt for one in everything), default=0)
    cause, code = (last.cause, last.exit_code) if last else ("", None)
    return Timeline(
        job=job,
        how=how,
        cause=cause,
        exit_code=code,
        seconds=end,
        attempts=attempts,
        hosts=tuple(found),
        notes=tuple(notes),
        events=tuple(_events(everything, roots)),
        utc=utc,
    )


def _of(rank: int | None, marks: Sequence[tuple[int | None, Mark]]) -> tuple[Mark, ...]:
    return tuple(mark for whose, mark in marks if whose == rank)


def _roots(lines: Sequence[Line]) -> list[Line]:
    """Return, for each attempt, the failure that ended it: the one that the hosts name."""
    roots = []
    for attempt in {one.attempt for one in lines if one.event == "failed"}:
        here = sorted((one for one in lines if one.attempt == attempt), key=lambda one: one.seconds)
        named = " ".join(one.cause for one in here if one.event in ("restart", "ending", "ended"))
        failed = [one for one in here if one.event == "failed"]
        roots.append(next((one for one in failed if one.cause[:100] in named), failed[0]))
    return roots


def _events(lines: Sequence[Line], roots: Sequence[Line]) -> Iterator[Event]:
    """Yield the events, in order; events of several hosts or ranks once."""
    same: dict[tuple[object, ...], list[Line]] = {}
    for one in sorted(lines, key=lambda one: one.seconds):
        if one.event in _HAPPENED and (one.event != "ended" or one.rank is None):
            same.setdefault((one.event, one.attempt, one.cause), []).append(one)
    for first, *others in same.values():
        name = first.host.replace("/", "_")
        where, files = first.host, [f"{name}/stderr.log"]
        if first.rank is not None:
            where += f", rank {first.rank}"
            files.insert(0, f"{name}/attempt-{first.attempt}/rank-{first.rank}.log")
        where += f" and {len(others)} more" if others else ""
        kind, at, words = _mark(first._replace(cause="") if first.event == "ended" else first)
        yield Event(kind, at, first.host, where, words, first.text, files, first in roots)


def _is_end(line: Line) -> bool:
    return line.event == "ended" and line.rank is None


def _how(ends: Sequence[Line]) -> tuple[str, Line | None]:
    last = max(ends, key=lambda one: (bool(one.exit_code), bool(one.cause)), default=None)
    if last is None:
        return "has not ended", None
    if last.exit_code == 0:
        return "succeeded", last
    return "stopped" if last.cause.startswith("stopped by ") else "failed", last


def _mark(line: Line) -> Mark:
    code = "" if line.exit_code is None else f"exit code {line.exit_code}"
    words = f"{line.cause} ({code})" if line.cause and code else line.cause or code
    return Mark(line.event, line.seconds, words)


def _said(hosts: Mapping[str, Sequence[Line]], end: float) -> _Said:
    stalls: dict[int, list[tuple[float, float, str]]] = {}
    lost: dict[str, tuple[float, str]] = {}
    for lines in hosts.values():
        for number, one in enumerate(lines):
            if one.event == "lost":
                lost[one.host] = one.seconds, one.cause
            for rank in one.ranks if one.event == "stalled" else ():
                until = next(_ends_of(rank, lines[number + 1 :]), end)
                stalls.setdefault(rank, []).append((one.since, until, one.cause))
    return _Said(stalls, lost)


def _ends_of(rank: int, later: Sequence[Line]) -> Iterator[float]:
    for one in later:
        if one.event == "continued" and rank in one.ranks:
            yield one.since
        elif one.event == "attempt":
            yield one.seconds


def _gone_at(
    name: str, lines: Sequence[Line], said: _Said, *, has_ended: bool, end: float
) -> tuple[float, str]:
    """Return the time after which nothing is known about a host, and why."""
    if any(_is_end(one) for one in lines):
        return end, ""
    if name in said.lost:
        at, why = said.lost[name]
        return max(at, 0.0), f"lost: {why}"
    return (lines[-1].seconds if has_ended else end), "its file ends here"


def _lane(
    name: str,
    rank: int | None,
    lines: Sequence[Line],
    said: _Said,
    gone: tuple[float, str],
    end: float,
) -> Lane:
    own = [one for one in lines if one.host == name and one.rank in (None, rank)]
    bars: list[Bar] = []
    now = Bar("unknown", 0.0, 0.0, 0, "not started")
    for one in own:
        kind, words = _next(now.kind, one)
        if one.event == "saved" and now.kind == "saving":
            now = now._replace(words=f"saved; {now.words}")
        if kind != now.kind or one.event == "attempt":
            bars.append(now._replace(seconds=one.seconds - now.start))
            now = Bar(kind, one.seconds, 0.0, one.attempt, words)
        elif one.rank is not None and one.exit_code is not None:
            now = now._replace(words=words)
    bars.append(now._replace(seconds=end - now.start))
    bars = [
        part
        for bar in bars
        for part in _with_stalls(bar, said.stalls.get(-1 if rank is None else rank, ()))
    ]
    codes = [one.exit_code for one in own if one.event == "ended" and one.rank is not None]
    shown = tuple(bar for bar in _until(bars, gone, end) if bar.seconds > 0)
    last = codes[-1] if codes else None
    ended = "" if last is None else f"exit {last}" if last >= 0 else signal_name(-last).split()[0]
    return Lane(rank, shown, (), ended)


def _next(kind: str, line: Line) -> tuple[str, str]:
    """Return what a rank does after a line, and the words for it."""
    event = line.event
    if event == "began":
        return "joining", ""
    if event == "attempt":
        return "start", ""
    if event == "runs":
        return "training", ""
    if event == "stop":
        return ("saving" if kind in _RUNS else kind), line.cause
    if event == "ending":
        return ("ending" if kind in _RUNS else kind), line.cause
    if event == "restart":
        return "restart", line.cause
    if event == "ended" and (kind != "restart" or line.rank is None):
        code = "" if line.exit_code is None else f"exit code {line.exit_code}"
        return "ended", code
    return kind, ""


def _with_stalls(bar: Bar, stalls: Sequence[tuple[float, float, str]]) -> Iterator[Bar]:
    """Split a bar of training: in some of its parts the rank waits."""
    at, end = bar.start, bar.start + bar.seconds
    for since, until, cause in sorted(stalls) if bar.kind == "training" else ():
        since, until = max(at, since), min(end, until)
        if since < until:
            yield bar._replace(start=at, seconds=since - at)
            yield Bar("waiting", since, until - since, bar.attempt, cause)
            at = until
    yield bar._replace(start=at, seconds=end - at)


def _until(bars: Sequence[Bar], gone: tuple[float, str], end: float) -> Iterator[Bar]:
    at, why = gone
    for bar in bars:
        yield bar._replace(seconds=min(bar.seconds, at - bar.start))
    last = bars[-1].attempt
    yield Bar("unknown", at, end - at, last, why)
