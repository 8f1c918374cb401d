"""Where ranks are: their Python stacks, of all hosts, equal ones grouped. Pure.

A rank replies with its threads (in_rank.py). A rank that holds Python's lock does not; it writes
where its main thread is when it gets a signal (faulthandler). The signal is sent only if a user
wants it: poll(2) and others end early at any signal, even while Python's lock is held, and the
script's code may take that for an error. Times are on the clock time.monotonic(), waits in seconds.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from launcher.text.words import join_and_count, printable, some_of

GATHER_SECONDS = 3.0  # for all hosts
MOST_CALLS, _MOST_THREADS, _LONGEST = 60, 30, 300  # of a rank; characters of a name
_MOST_TEXT, _MOST_BYTES = 5_000, 40_000  # characters of a rank's stacks; bytes of a message
_MOST_LINES = 400
_MOST_PLACE = 100  # characters
AT_EXIT = "in its exit handlers"
_LIBRARY = re.compile(r"/lib(64)?/python3\.|-packages/|^<frozen ")
_OURS = re.compile(
    r"(/launcher/(run|watch|warm)|/sm-launch-\d+-[0-9a-f]+)/(rank|in_rank|warm|unseen)\.py$"
)
# Signals at which faulthandler writes where a process is, with its words (Modules/faulthandler.c).
CRASHES: Mapping[int, str] = {
    signal.SIGSEGV: "Segmentation fault",
    signal.SIGBUS: "Bus error",
    signal.SIGFPE: "Floating point exception",
    signal.SIGILL: "Illegal instruction",
    signal.SIGABRT: "Aborted",
}
_FATAL = "Fatal Python error: "
_WRITTEN = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')


class Call(NamedTuple):
    """A call of a stack: its function, file and current line."""

    function: str
    path: str
    line: int


Calls = tuple[Call, ...]  # the innermost last
Threads = tuple[tuple[str, Calls], ...]  # by name; "" is the main thread, which is the first
Stacks = tuple[tuple[tuple[int, ...], str], ...]  # ranks, and their stacks as text


def calls_of(value: Any) -> Calls:
    """Return the calls that a rank has sent. Raises one of several errors if they are not valid."""
    calls = []
    for function, path, line in value[-MOST_CALLS:]:
        calls.append(Call(_text(function), _text(path), int(line or 0)))
    return tuple(calls)


def threads_of(value: Any) -> Threads:
    """Return the threads that a rank has sent. Raises as `calls_of` does."""
    return tuple((_text(name), calls_of(calls)) for name, calls in value[:_MOST_THREADS])


def calls_in(lines: Iterable[str]) -> Calls:
    """Return the calls that faulthandler has written, which has the innermost first."""
    found = [match for line in lines if (match := _WRITTEN.fullmatch(line))]
    calls = [Call(_text(match[3]), _text(match[1]), int(match[2])) for match in found]
    return tuple(calls[:MOST_CALLS][::-1])


def crash_in(text: str, number: int) -> Calls:
    """Return where a Python thread was when a signal ended its process, from faulthandler's text.

    () if unknown: it was a thread of C++, or the text is about something else.
    """
    *_, last = text.split(_FATAL)
    if not last.replace("-", " ").startswith(f"{CRASHES[number]}\n"):
        return ()
    return tuple(one for one in calls_in(last.splitlines()) if not _OURS.search(one.path))


def frames_of(calls: Calls) -> str:
    """Return calls in a traceback's form, without source lines."""
    return "\n".join(f"  {_frame(one)}" for one in calls)


def _frame(call: Call) -> str:
    return f'File "{call.path}", line {call.line}, in {call.function}'


def _text(value: Any) -> str:
    return printable(str(value)[-_LONGEST:])


def place(calls: Calls) -> str:
    """Return the place of the innermost call in the user's own code: `load, data.py:88`."""
    own = _own(calls) or calls
    if not own:
        return ""
    function, path, line = own[-1]
    return f"{function}, {path.rpartition('/')[2]}:{line}"[-_MOST_PLACE:]


def still_in(calls: Calls) -> str:
    """Return the place of the innermost call, and of the user's own call that led there."""
    innermost, own = place(calls[-1:]), place(calls)
    return innermost if innermost == own else f"{innermost}, called in {own}"


def in_place(calls: Calls) -> str:
    """Return that place as the end of a sentence, "" if unknown."""
    where = place(calls)
    return f", in {where}" if where else ""


def kept_by(main: Calls, threads: Threads, child: Any) -> str:
    """Describe what keeps a rank's process alive after its script ended.

    `main` is where its main thread is, `threads` are the others for which Python waits, and `child`
    is the name and pid of a process that it waits for, None without one. Raises one of several
    errors if that is not valid.
    """
    own = [one for one in threads if _own(one[1])]  # the user's own threads say most
    if own or (threads and not child):
        name, calls = (own or threads)[0]
        more = f", and {len(threads) - 1} more" if len(threads) > 1 else ""
        return f'thread "{name[:_MOST_PLACE]}"{in_place(calls)}{more}'
    if child:
        name, pid = child
        return f"it is waiting for its child process {_text(name)[:_MOST_PLACE]} (pid {int(pid)})"
    return f"{AT_EXIT}{in_place(main)}"


def _own(calls: Calls) -> Calls:
    return tuple(one for one in calls if not (_LIBRARY.search(one.path) or _OURS.search(one.path)))


def text_of(threads: Threads) -> str:
    """Return the lines of a rank's stacks: the main thread, and threads in the user's code.

    Other threads wait in libraries, at different lines in each rank. If the text is too long, the
    outermost calls are omitted.
    """
    lines, room = list[str](), _MOST_TEXT
    for name, calls in threads:
        if room < 0 or (name and not _own(calls)):
            continue
        kept: list[str] = []
        for one in reversed([one for one in calls if not _OURS.search(one.path)]):
            line = f"    {_frame(one)}"
            room -= len(line) + 1
            if room >= 0:
                kept.insert(0, line)
        lines += [f"  thread {name}:" if name else "  main thread:", *kept]
    return "\n".join(lines)


def grouped(texts: Mapping[int, str], room: int = _MOST_BYTES) -> Stacks:
    """Return the stacks of ranks, equal ones once, as far as there is room, in bytes."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        by_text.setdefault(text, []).append(rank)
    found, room, others = [], min(room, _MOST_BYTES), list[int]()
    for text, ranks in by_text.items():
        size = len(json.dumps((ranks, text)))
        if size <= room:
            room -= size
            found.append((tuple(ranks), text))
        else:
            others += ranks
    if others:
        found.append((tuple(others), "  the stacks of these ranks are too long to be shown."))
    return tuple(found)


def within(stacks: Stacks, world: int) -> Stacks:
    """Return the stacks of ranks that exist in a job of `world` ranks."""
    own = ((tuple(rank for rank in ranks if rank < world), text) for ranks, text in stacks)
    return tuple((ranks, text) for ranks, text in own if ranks)


class Gathering(NamedTuple):
    """The coordinator's state of the current request for stacks, if any."""

    number: int = 0
    deadline: float = math.inf
    requested_by: frozenset[str] = frozenset()  # users on these hosts; "": the log
    received: Mapping[str, Stacks] = {}
    may_signal: bool = False  # signal ranks that do not reply


def requested(
    state: Gathering, requested_by: Collection[str], now: float, *, may_signal: bool
) -> Gathering:
    """Note who requests stacks; `number` is a new one if hosts are to collect them now."""
    all_of = state.requested_by.union(requested_by)
    if state.deadline < math.inf and state.may_signal >= may_signal:
        return state._replace(requested_by=all_of)
    return Gathering(state.number + 1, now + GATHER_SECONDS, all_of, may_signal=may_signal)


def received(state: Gathering, host: str, number: int, stacks: Stacks) -> Gathering:
    """Add a host's stacks."""
    if number != state.number:
        return state  # too late
    return state._replace(received={**state.received, host: stacks})


def shown(state: Gathering, hosts: Collection[str]) -> tuple[str, ...]:
    """Return the stacks of all ranks as lines, those of the most ranks first."""
    by_text: dict[str, list[int]] = {}
    for stacks in state.received.values():
        for ranks, text in stacks:
            by_text.setdefault(printable(text[:_MOST_TEXT], keep="\n"), []).extend(ranks)
    order = sorted(by_text.items(), key=lambda one: (-len(one[1]), min(one[1])))
    lines = _fitting([[_title(sorted(ranks)), *text.splitlines()] for text, ranks in order])
    missing = sorted(set(hosts) - set(state.received))
    if missing:
        some = some_of(missing)
        names = join_and_count(some, len(missing) - len(some))
        lines.append(f"no answer within {GATHER_SECONDS:g} s from {names}.")
    return tuple(lines or ["no rank is running."])


def _fitting(blocks: Sequence[list[str]]) -> list[str]:
    """Return as many lines as people read, and a message holds: the rarest stacks first.

    Those say most about a hang. The innermost calls of each are kept.
    """
    kept, lines, size = list[str](), 0, 0
    most = max(8, _MOST_LINES // max(1, len(blocks)))
    for done, block in enumerate(reversed(blocks)):
        short = block if len(block) <= most else [block[0], "  ...", *block[2 - most :]]
        lines, size = lines + len(short), size + len(json.dumps(short))
        if lines > _MOST_LINES or size > _MOST_BYTES:
            return [
                f"{len(blocks) - done} more stacks, of as many ranks or more, are omitted.",
                *kept,
            ]
        kept = [*short, *kept]
    return kept


def _title(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}:"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"{len(ranks)} ranks ({text if len(text) <= 60 else f'{text[:57]}...'}):"
