"""The hosts' output: whole lines, each after its host's name, and progress bars.

A thread reads it from their logs: only that thread waits for a slow reader. On a terminal one bar
stands below the lines; elsewhere ranks' keepers turn bars into lines (launcher/run/bars.py).
"""

from __future__ import annotations

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
_MOST = 64 * 1024  # bytes of an incomplete line
_READ = 64 * 1024  # bytes
_PATIENCE_SECONDS = 5
_POLL_SECONDS = 0.02  # polling all logs of two hosts takes 10 microseconds
_CONTROL = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


class OutputLines:
    """One stream of bytes. Text that `\\r` overwrites is gone, as on a terminal."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add data; return the complete lines, without newlines."""
        *lines, tail = (self._tail + data).split(b"\n")
        if b"\r" in tail:
            # A newline may follow at once: then the last \r belongs to the line's end.
            tail = b"\r" + _last(tail) + (b"\r" if tail.endswith(b"\r") else b"")
        while len(tail) > _MOST:
            lines.append(tail[:_MOST])
            tail = tail[_MOST:]
        self._tail = tail
        return [_last(line) for line in lines]

    @property
    def bar(self) -> bytes:
        """The progress bar: the current text of a line that `\\r` has restarted."""
        return _last(self._tail) if b"\r" in self._tail else b""

    def end(self) -> list[bytes]:
        """Return the line that has no newline, if there is one."""
        tail, self._tail = _last(self._tail), b""
        return [tail] if tail else []


def _last(line: bytes) -> bytes:
    """Return what a terminal would show of a line; lines may end with `\\r\\n`."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Output:
    """Copies the hosts' stdout and stderr to this process's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # If a stream was closed at the start (`>&-`), another file of ours has its number.
        streams = ((STDOUT, sys.stdout), (STDERR, sys.stderr))
        self._open = {fd for fd, stream in streams if stream is not None}
        self.terminals = {fd for fd in self._open if os.isatty(fd)}
        self._colours = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._streams: dict[
            tuple[int, int], OutputLines
        ] = {}  # by the host's number and descriptor
        self._bar: tuple[int, bytes] | None = None  # on the screen: where, and what

    def feed(self, number: int, fd: int, data: bytes) -> None:
        """Add output of host algo-NUMBER to a descriptor; b"" if the host has closed it."""
        stream = self._streams.get((number, fd))
        if stream is None:
            stream = self._streams[number, fd] = OutputLines()
        lines = stream.feed(data) if data else stream.end()
        self._write_lines(number, fd, lines)

    def say(self, text: str) -> None:
        """Write our own line to stderr."""
        line = f"launcher: {printable(text)}\n"
        self._write(STDERR, line.encode("utf-8", "backslashreplace"))

    def show(self, text: str) -> None:
        """Write our own text to stdout, unchanged."""
        self._write(STDOUT, os.fsencode(text))

    def _write_lines(self, number: int, fd: int, lines: Sequence[bytes]) -> None:
        prefix = self._prefix(number, fd)
        self._write(fd, b"".join(prefix + line + b"\n" for line in lines))

    def _prefix(self, number: int, fd: int) -> bytes:
        name = b"algo-%d | " % number
        if fd not in self.terminals or not self._colours:
            return name
        return b"\x1b[0;%dm%s\x1b[0m" % (_COLOURS[(number - 1) % len(_COLOURS)], name)

    def _write(self, fd: int, data: bytes) -> None:
        """Write lines above the bar, which is that of the first host that has one."""
        bar = self._next_bar()
        pieces = [(fd, data)] if data else []
        if bar != self._bar or (data and fd in self.terminals):
            gone = [(self._bar[0], _CLEAR)] if self._bar else []
            pieces = [*gone, *pieces, *([bar] if bar else [])]
        self._bar = bar
        for where, parts in itertools.groupby(pieces, key=operator.itemgetter(0)):
            if where in self._open:  # in one piece, if it is one place
                write(where, b"".join(part for _, part in parts))

    def _next_bar(self) -> tuple[int, bytes] | None:
        for (number, fd), stream in sorted(self._streams.items()):
            if fd in self.terminals and stream.bar:
                columns = _columns(fd)
                width = columns - len(f"algo-{number} | ") - 1
                return fd, self._prefix(number, fd) + _cut(stream.bar, width)
        return None


def _columns(fd: int) -> int:
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:  # its window was closed, and the job continues (`nohup`, `disown`)
        return 80


def _cut(bar: bytes, width: int) -> bytes:
    """Cut a bar to the terminal's width: a bar that wraps could not be overwritten."""
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
        """Print the log up to that size."""
        while self.printed < size:
            data = os.pread(self._file.fileno(), min(_READ, size - self.printed), self.printed)
            if not data:
                return
            self.printed += len(data)
            self._feed(data)

    def print_all(self, *, is_last: bool) -> None:
        """Print the rest; if nothing writes any more, also a line without its newline."""
        ends = is_last or (self._is_over() and not self._has_ended)
        self.print(self.size())
        if ends:
            self._has_ended = True
            self._feed(b"")


class Printer:
    """Follows logs, from `follow` to the end of `with`, which waits until all is printed.

    The reader may be slow or gone: a stop ends that wait, and after `hurry` nothing waits for long.
    """

    def __init__(self, output: Output, signals: Signals) -> None:
        self._output = output
        self._signals = signals
        self._logs: tuple[_Log, ...] = ()
        # Our own texts, and how far to print each log before them.
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
        """Stop waiting for a reader that has read nothing for 5 s: the job was stopped."""
        self._patience = _PATIENCE_SECONDS

    def follow(self, number: int, logs: Mapping[int, str], is_over: Callable[[], bool]) -> None:
        """From now on print the logs of host algo-NUMBER.

        `is_over()` tells whether all of it has been written.
        """
        opened = [
            _Log(path, functools.partial(self._output.feed, number, fd), is_over)
            for fd, path in logs.items()
        ]
        self._logs = (*self._logs, *opened)

    def say(self, text: str) -> None:
        """Print our own line to stderr, after the hosts' output until now."""
        self._add(functools.partial(self._output.say, text))

    def show(self, text: str) -> None:
        """Print our own text to stdout, after the hosts' output until now."""
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
            # Keep the order of writes, as precisely as the kernel's clock does.
            for log in sorted(self._logs, key=_Log.changed):
                log.print_all(is_last=is_over)
