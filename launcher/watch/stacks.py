"""Where ranks are: their Python stacks, of all hosts, equal ones grouped. Pure.

A rank replies with its threads (in_rank.py). A rank that holds Python's lock does not; it writes
where its main thread is when it gets a signal (faulthandler). The signal is sent only if a user
wants it, before ranks are killed, and when a hang that will end the job is logged: poll(2) and
others end early at any signal, even while Python's lock is held, and the script's code may take
that for an error. Calls are in faulthandler's words: the innermost comes first there, and last in
`Calls`.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from launcher.text.words import listed, printable

GATHER_SECONDS = 3.0  # for all hosts
MOST_CALLS = 60  # of a thread
_MOST_LINES, _MOST_BYTES = 400, 40_000  # of all hosts
_MOST_PLACE = 100  # characters
_LIBRARY = re.compile(r"/lib(64)?/python3\.|-packages/|^<frozen ")
_STANDARD = re.compile(r"/lib(64)?/python3\.\d+/(?!(site|dist)-packages/)|^<frozen ")
_OURS = re.compile(r"/launcher/(run|watch|warm)/(rank|in_rank|warm)\.py$")
_JOINS = re.compile(r"/(multiprocessing/util|concurrent/futures/process)\.py$")
# Signals at which faulthandler writes where a process is, with its words (Modules/faulthandler.c).
CRASHES: Mapping[int, str] = {
    signal.SIGSEGV: "Segmentation fault",
    signal.SIGBUS: "Bus error",
    signal.SIGFPE: "Floating point exception",
    signal.SIGILL: "Illegal instruction",
    signal.SIGABRT: "Aborted",
}
FATAL = "Fatal Python error: "
# The script's own faulthandler shows the other threads, too.
_CRASHED = re.compile(r"^(?:Stack|Current thread) .*\n((?:  .*\n?)*)", re.MULTILINE)
_WRITTEN = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')


class Call(NamedTuple):
    """A call of a stack: its function, file and current line."""

    function: str
    path: str
    line: int


Calls = tuple[Call, ...]  # the innermost last


class Thread(NamedTuple):
    """A thread of a rank; the main one has no name. Python waits for it at exit if it `keeps`."""

    name: str
    calls: Calls
    keeps: bool = False


def threads_of(values: Any) -> tuple[Thread, ...]:
    """Return the threads that a rank has sent."""
    return tuple(Thread(printable(name), calls_in(lines), keeps) for name, lines, keeps in values)


def calls_in(lines: Iterable[str]) -> Calls:
    """Return the calls that faulthandler has written, or a rank in its words."""
    found = [match for line in lines if (match := _WRITTEN.fullmatch(printable(line)))]
    calls = [Call(match[3], match[1], int(match[2])) for match in found]
    return tuple(calls[:MOST_CALLS][::-1])


def written_in(lines: Iterable[str]) -> Calls:
    """Return the calls of the last stack that faulthandler has written."""
    return calls_in("\n".join(lines).rpartition("Stack ")[2].splitlines())


def crash_in(text: str, number: int) -> Calls:
    """Return where a Python thread was when a signal ended its process, from faulthandler's text.

    () if unknown: it was a thread of C++, or the text is about something else.
    """
    *_, last = text.split(FATAL)
    if not last.replace("-", " ").startswith(f"{CRASHES[number]}\n"):
        return ()
    crashed = _CRASHED.search(last)
    calls = calls_in(crashed[1].splitlines()) if crashed else ()
    return tuple(one for one in calls if not _OURS.search(one.path))


def frames_of(calls: Calls) -> str:
    """Return calls in a traceback's form, without source lines."""
    return "\n".join(f"  {_frame(one)}" for one in calls)


def _frame(call: Call) -> str:
    return f'File "{call.path}", line {call.line}, in {call.function}'


def place(calls: Calls) -> str:
    """Return the place of the innermost call in the user's own code: `load, data.py:88`."""
    own = _own(calls) or calls
    if not own:
        return ""
    function, path, line = own[-1]
    return f"{function}, {path.rpartition('/')[2]}:{line}"[-_MOST_PLACE:]


def still_in(calls: Calls) -> str:
    """Return the innermost call's place, and that of the user's own call that led there.

    Calls of Python's own library do not count: they say little.
    """
    others = tuple(one for one in calls if not _STANDARD.search(one.path)) or calls
    innermost, own = place(others[-1:]), place(calls)
    return innermost if innermost == own else f"{innermost}, called in {own}"


def in_place(calls: Calls) -> str:
    """Return that place as the end of a sentence, "" if unknown."""
    where = place(calls)
    return f", in {where}" if where else ""


def kept_by(threads: Sequence[Thread], child: str) -> str:
    """Describe what keeps a rank's process alive after its script ended.

    `child` names a child process for which Python may wait, "" for none.
    """
    others = [thread for thread in threads if thread.keeps]
    own = [thread for thread in others if _own(thread.calls)]  # the user's own threads say most
    if child and not own and any(_JOINS.search(call.path) for one in threads for call in one.calls):
        return f"it is waiting for its child process {printable(child)}"
    for thread in own or others:
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        return f'thread "{thread.name[:_MOST_PLACE]}"{in_place(thread.calls)}{more}'
    return f"in its exit handlers{in_place(threads[0].calls if threads else ())}"


def _own(calls: Calls) -> Calls:
    return tuple(one for one in calls if not (_LIBRARY.search(one.path) or _OURS.search(one.path)))


def text_of(threads: Iterable[Thread], room: int) -> str:
    """Return the lines of a rank's stacks: the main thread, and threads in the user's code.

    Other threads wait in libraries, at different lines in each rank. If the text takes more bytes
    of a message than there is `room`, the outermost calls are omitted.
    """
    lines = list[str]()
    for name, calls, _ in threads:
        if room < 0 or not calls or (name and not _own(calls)):
            continue
        kept: list[str] = []
        for one in reversed([one for one in calls if not _OURS.search(one.path)]):
            line = f"    {_frame(one)}"
            room -= len(json.dumps(line))
            if room >= 0:
                kept.insert(0, line)
        lines += [f"  thread {name}:" if name else "  main thread:", *kept]
    return "\n".join(lines)


def shown(stacks: Mapping[str, Iterable[tuple[int, str]]], hosts: Collection[str]) -> list[str]:
    """Return the stacks of all ranks, by host, as lines: those of the most ranks first.

    As many as people read, and a message holds: the rarest are kept, which say most about a hang.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(one for of_host in stacks.values() for one in of_host):
        by_text.setdefault(printable(text, keep="\n"), []).append(rank)
    lines, omitted, most, room = list[str](), 0, _MOST_LINES, _MOST_BYTES
    for text, ranks in sorted(by_text.items(), key=lambda one: (len(one[1]), -one[1][0])):
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({_in_runs(ranks)})"
        block = [f"{who}:", *text.splitlines()]
        most, room = most - len(block), room - len(json.dumps(block))
        if min(most, room) < 0:
            omitted += 1
        else:
            lines = [*block, *lines]
    if omitted:
        lines.insert(0, f"{omitted} more stacks, of as many ranks or more, are omitted.")
    missing = sorted(set(hosts) - set(stacks))
    if missing:
        names = listed(missing)
        lines.append(f"no answer within {GATHER_SECONDS:g} s from {names}.")
    return lines or ["no rank is running."]


def _in_runs(ranks: Sequence[int]) -> str:
    """Return sorted ranks as text: `0-1, 3-5`."""
    by_distance = groupby(enumerate(ranks), lambda numbered: numbered[1] - numbered[0])
    runs = [[rank for _, rank in run] for _, run in by_distance]
    return listed(["-".join(map(str, run[:1] + run[1:][-1:])) for run in runs])
