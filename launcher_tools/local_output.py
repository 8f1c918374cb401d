"""What the hosts print: whole lines, each behind its host's name, and progress bars.

It is read from their logs in a thread: only that waits for a slow reader. On a terminal one bar
stands below the lines; elsewhere a bar's state is a line now and then.
"""

from __future__ import annotations

import codecs
import collections
import functools
import itertools
import math
import operator
import os
import re
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Callable

from launcher.errors import STOPS
from launcher.host.signals import Signals
from launcher.text.words import printable

STDOUT, STDERR = 1, 2
_COLOURS = (36, 33, 32, 35, 34, 31)
_CLEAR = b"\r\x1b[K"
_MOST = 64 * 1024  # bytes that may wait for the end of their line
_READ = 64 * 1024  # bytes
_PATIENCE_SECONDS = 5
_POLL_SECONDS = 0.02  # to poll all logs of two hosts takes 10 microseconds
_STATE_SECONDS = 5  # in which a bar's state is at most one line of a file
_CONTROL = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_UP = b"\x1b[A"  # tqdm writes it behind a bar that it has written below another one
_WRITTEN_AT_ONCE_SECONDS = 0.01
_WHOLE_LINE = re.compile(rb"[^\r\n]+\r?\n")
# What is never a part of the bar before it, even if both were written before one of them was read:
# whatever is behind one of tqdm's bars, or one that it has cleared, and these two.
_TQDM = rb".+?\[(?:\d+:)+\d\d[<,][^\]]{0,200}\] *"
_GLUED = re.compile(
    rb"(" + _TQDM + rb"(?=[^\s\x1b])| {8,}(?=[^ ])"
    rb"|.+?(?=launcher: |Traceback \(most recent call last\):))(.+)"
)


class OutputLines:
    """One stream of bytes. What `\\r` overwrites is gone, as on a terminal."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes, now: float = 0) -> list[bytes]:
        """Take what was read at a time; return the lines that have ended, without newlines."""
        return [_last(line) for line in self._split(self._tail + data)]

    def _split(self, text: bytes) -> list[bytes]:
        """Keep what has no newline; return the lines, with what `\\r` overwrites."""
        *lines, tail = text.split(b"\n")
        if b"\r" in tail:
            # A newline may follow at once: then the last \r is a part of the line's end.
            tail = b"\r" + _last(tail) + (b"\r" if tail.endswith(b"\r") else b"")
        while len(tail) > _MOST:
            lines.append(tail[:_MOST])
            tail = tail[_MOST:]
        self._tail = tail
        return lines

    @property
    def bar(self) -> bytes:
        """The progress bar: what is there of a line that was begun anew with `\\r`."""
        return _last(self._tail) if b"\r" in self._tail else b""

    def poll(self, now: float) -> list[bytes]:
        """Return the lines that are due without more data."""
        return []

    def end(self) -> list[bytes]:
        """Return the line that has no newline, if there is one."""
        tail, self._tail = _last(self._tail), b""
        return [tail] if tail else []


class LinesOfFile(OutputLines):
    """The same for what is no terminal: a bar's state is a line, at most one in 5 s.

    Nothing is glued to it: a whole line that comes later than a bar, and does not begin with `\\r`,
    is another process's. Bars one below the other count as one: so do those of several ranks, which
    cannot be told apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self._printed = b""  # state of this bar
        self._cut_off = b""  # state of a bar that a line was written behind, not printed yet
        self._next = -math.inf  # when a state may be printed
        self._fed_at = -math.inf
        self._has_lower_bars = False

    def feed(self, data: bytes, now: float = 0) -> list[bytes]:
        """Take what was read at a time; return the lines that have ended, without newlines."""
        lines = self._cut(now) if self._is_of_another(data, now) else []
        self._fed_at = now
        text = self._tail + data
        if _UP in text:
            self._has_lower_bars = True
            text = text.replace(_UP, b"")
        for line in self._split(text):
            lines += self._shown(line)
        if self.bar.strip():
            self._cut_off = b""
        return lines

    def _is_of_another(self, data: bytes, now: float) -> bool:
        """Tell whether data begins with a line that is no part of the bar before it."""
        if b"\r" not in self._tail or self._tail.endswith(b"\r"):
            return False
        if now < self._fed_at + _WRITTEN_AT_ONCE_SECONDS or not _WHOLE_LINE.match(data):
            return False
        return _whole(self._tail) == self._tail

    def _cut(self, now: float) -> list[bytes]:
        lines = self.poll(now)
        self._cut_off = self.bar if self.bar != self._printed else b""
        self._tail = b""
        return lines

    def _shown(self, line: bytes) -> list[bytes]:
        """Return what is to be printed of a line that has ended."""
        before, is_bar, shown = line.rstrip(b"\r").rpartition(b"\r")
        was_cleared = before.endswith(b" ") and not _last(before).strip()
        if not is_bar or (was_cleared and not re.fullmatch(_TQDM, shown)):
            return self._line(shown)
        match = _GLUED.fullmatch(shown)
        bar, *others = match.groups() if match else (shown,)
        if self._has_lower_bars:  # it ends in order to reach the row below
            self._cut_off = bar if bar.strip() else self._cut_off
            return others
        is_new = bar != self._printed and not (others and bar.isspace())
        self._printed = self._cut_off = b""
        return [bar, *others] if is_new else others

    def _line(self, line: bytes) -> list[bytes]:
        """Return a line that is no bar, behind one that has ended if it tells how the job ends."""
        if not line and self._has_lower_bars:
            return []
        state = self._cut_off
        if not line.startswith(b"launcher: ") or state == self._printed or not state.strip():
            return [line]
        self._printed, self._cut_off = state, b""
        return [state, line]

    def poll(self, now: float) -> list[bytes]:
        """Return the lines that are due without more data."""
        if now < self._next:
            return []
        state, self._cut_off = _whole(self.bar if self.bar.strip() else self._cut_off), b""
        if state == self._printed or not _CONTROL.sub(b"", state).strip():
            return []
        self._printed, self._next = state, now + _STATE_SECONDS
        return [state]

    def end(self) -> list[bytes]:
        """Return what has no newline, and has not been printed."""
        rest, self._cut_off = [self._cut_off, *super().end()], b""
        return [state for state in rest if state.strip() and state != self._printed]


def _last(line: bytes) -> bytes:
    """Return what a terminal would show of a line; lines may end with `\\r\\n`."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _whole(state: bytes) -> bytes:
    """Cut off a character of which only the beginning has been read."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(state)
    return state[: len(state) - len(decoder.getstate()[0])]


class Output:
    """Takes what hosts write to their stdout and stderr, and writes it to this process's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # One that was closed from the start (`>&-`) has its number taken by something of ours.
        streams = ((STDOUT, sys.stdout), (STDERR, sys.stderr))
        self._open = {fd for fd, stream in streams if stream is not None}
        self._terminals = {fd for fd in self._open if os.isatty(fd)}
        self._colours = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._streams: dict[
            tuple[int, int], OutputLines
        ] = {}  # by the host's number and descriptor
        self._bar: tuple[int, bytes] | None = None  # on the screen: where, and what

    def feed(self, number: int, fd: int, data: bytes) -> None:
        """Take what host algo-NUMBER has written to a descriptor; b"" if it has closed it."""
        stream = self._streams.get((number, fd))
        if stream is None:
            stream = OutputLines() if fd in self._terminals else LinesOfFile()
            self._streams[number, fd] = stream
        lines = stream.feed(data, time.monotonic()) if data else stream.end()
        self._write_lines(number, fd, lines)

    def poll(self) -> None:
        """Write what is due of bars, where that is no terminal."""
        now = time.monotonic()
        for (number, fd), stream in self._streams.items():
            if lines := stream.poll(now):
                self._write_lines(number, fd, lines)

    def say(self, text: str) -> None:
        """Write a line of our own to stderr."""
        line = f"launcher: {printable(text)}\n"
        self._write(STDERR, line.encode("utf-8", "backslashreplace"))

    def show(self, text: str) -> None:
        """Write a text of our own to stdout, its lines as they are."""
        self._write(STDOUT, os.fsencode(text))

    def _write_lines(self, number: int, fd: int, lines: Sequence[bytes]) -> None:
        prefix = self._prefix(number, fd)
        self._write(fd, b"".join(prefix + line + b"\n" for line in lines))

    def _prefix(self, number: int, fd: int) -> bytes:
        name = b"algo-%d | " % number
        if fd not in self._terminals or not self._colours:
            return name
        return b"\x1b[0;%dm%s\x1b[0m" % (_COLOURS[(number - 1) % len(_COLOURS)], name)

    def _write(self, fd: int, data: bytes) -> None:
        """Write lines above the bar, which is that of the first host that has one."""
        bar = self._next_bar()
        pieces = [(fd, data)] if data else []
        if bar != self._bar or (data and fd in self._terminals):
            gone = [(self._bar[0], _CLEAR)] if self._bar else []
            pieces = [*gone, *pieces, *([bar] if bar else [])]
        self._bar = bar
        for where, parts in itertools.groupby(pieces, key=operator.itemgetter(0)):
            if where in self._open:  # in one piece, if it is one place
                write(where, b"".join(part for _, part in parts))

    def _next_bar(self) -> tuple[int, bytes] | None:
        for (number, fd), stream in sorted(self._streams.items()):
            if fd in self._terminals and stream.bar:
                columns = _columns(fd)
                width = columns - len(f"algo-{number} | ") - 1
                return fd, self._prefix(number, fd) + _cut(stream.bar, width)
        return None


def _columns(fd: int) -> int:
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:  # its window was closed, and the job goes on (`nohup`, `disown`)
        return 80


def _cut(bar: bytes, width: int) -> bytes:
    """Cut a bar to the terminal's width: one that wraps could not be overwritten."""
    text = bar.decode("utf-8", "surrogateescape")
    if len(text) <= width:
        return bar
    text = _CONTROL.sub(b"", bar).decode("utf-8", "surrogateescape")
    return text[: max(0, width)].encode("utf-8", "surrogateescape")


def write(fd: int, data: bytes) -> None:
    """Write all of it; a closed or full output must not cost the job."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select([], [fd], [])
        except OSError:
            return


class _Log:
    """One of a host's two logs, and how far it has been printed."""

    def __init__(self, path: str, feed: Callable[[bytes], None], is_over: Callable[[], bool]):
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (to the very end)
        self._feed = feed
        self._is_over = is_over
        self._has_ended = False
        self.printed = 0

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def changed(self) -> int:
        return os.fstat(self._file.fileno()).st_mtime_ns

    def print(self, size: int) -> None:
        """Print what has come until the log had that size."""
        while self.printed < size:
            data = os.pread(self._file.fileno(), min(_READ, size - self.printed), self.printed)
            if not data:
                return
            self.printed += len(data)
            self._feed(data)

    def print_all(self, *, is_last: bool) -> None:
        """Print what is there, and if nobody writes any more also a line without its newline."""
        ends = is_last or (self._is_over() and not self._has_ended)
        self.print(self.size())
        if ends:
            self._has_ended = True
            self._feed(b"")


class Printer:
    """Follows logs, from `follow` to the end of `with`, which waits until all is printed.

    Whoever reads need not do so: a stop ends that wait, and after `hurry` it takes a reader.
    """

    def __init__(self, output: Output, signals: Signals) -> None:
        self._output = output
        self._signals = signals
        self._logs: tuple[_Log, ...] = ()
        # What is ours to print, and how far each log is to be printed before it.
        self._ours: collections.deque[tuple[Sequence[tuple[_Log, int]], Callable[[], None]]]
        self._ours = collections.deque()
        self._is_over = threading.Event()
        self._patience = math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Printer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        printed, since = -1, time.monotonic()
        while self._thread.is_alive() and time.monotonic() < since + self._patience:
            if printed != (now := sum(log.printed for log in self._logs)):
                printed, since = now, time.monotonic()
            self._thread.join(_POLL_SECONDS)
            if any(number in STOPS for number in self._signals.take()):
                return

    def hurry(self) -> None:
        """Wait no more for whoever has read nothing for 5 s: the job was stopped."""
        self._patience = _PATIENCE_SECONDS

    def follow(self, number: int, logs: Mapping[int, str], is_over: Callable[[], bool]) -> None:
        """Print from now on what host algo-NUMBER writes into its logs.

        `is_over()` tells whether all of it has been written.
        """
        opened = [
            _Log(path, functools.partial(self._output.feed, number, fd), is_over)
            for fd, path in logs.items()
        ]
        self._logs = (*self._logs, *opened)

    def say(self, text: str) -> None:
        """Print a line of our own to stderr, behind what the hosts have written until now."""
        self._add(functools.partial(self._output.say, text))

    def show(self, text: str) -> None:
        """Print a text of our own to stdout, behind what the hosts have written until now."""
        self._add(functools.partial(self._output.show, text))

    def _add(self, act: Callable[[], None]) -> None:
        self._ours.append(([(log, log.size()) for log in self._logs], act))

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_POLL_SECONDS)
            while self._ours:
                sizes, act = self._ours.popleft()
                for log, size in sizes:
                    log.print(size)
                act()
            # What was written last comes last, as nearly as the kernel's clock tells.
            for log in sorted(self._logs, key=_Log.changed):
                log.print_all(is_last=is_over)
            self._output.poll()
