"""Writes the hosts' output: whole lines, each behind its host's name, and one progress bar."""

from __future__ import annotations

import itertools
import operator
import os
import re
import select
import sys
from collections.abc import Mapping

from launcher.text import printable

STDOUT, STDERR = 1, 2
_COLOURS = (36, 33, 32, 35, 34, 31)
_CLEAR = b"\r\x1b[K"
_MOST = 64 * 1024  # bytes that may wait for the end of their line


class Lines:
    """One stream of bytes. What `\\r` overwrites is gone, as on a terminal."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take what was read; return the lines that have ended, without their newlines."""
        *lines, tail = (self._tail + data).split(b"\n")
        lines = [_last(line) for line in lines]
        if b"\r" in tail:
            # A newline may follow at once: then the last \r is a part of the line's end.
            tail = b"\r" + _last(tail) + (b"\r" if tail.endswith(b"\r") else b"")
        while len(tail) > _MOST:
            lines.append(_last(tail[:_MOST]))
            tail = tail[_MOST:]
        self._tail = tail
        return lines

    @property
    def bar(self) -> bytes:
        """The progress bar: what is there of a line that was begun anew with `\\r`."""
        return _last(self._tail) if b"\r" in self._tail else b""

    def end(self) -> list[bytes]:
        """Return the line that has no newline, if there is one."""
        tail, self._tail = _last(self._tail), b""
        return [tail] if tail else []


def _last(line: bytes) -> bytes:
    """Return what a terminal would show of a line; lines may end with `\\r\\n`."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Output:
    """Takes what hosts write to their stdout and stderr, and writes it to this process's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # One that was closed from the start (`>&-`) has its number taken by something of ours.
        streams = ((STDOUT, sys.stdout), (STDERR, sys.stderr))
        self._open = {fd for fd, stream in streams if stream is not None}
        self._terminals = {fd for fd in self._open if os.isatty(fd)}
        self._colours = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._streams: dict[tuple[int, int], Lines] = {}  # by the host's number and descriptor
        self._bar: tuple[int, bytes] | None = None  # on the screen: where, and what

    def feed(self, number: int, fd: int, data: bytes) -> None:
        """Take what host algo-NUMBER has written to a descriptor; b"" if it has closed it."""
        stream = self._streams.setdefault((number, fd), Lines())
        lines = stream.feed(data) if data else stream.end()
        prefix = self._prefix(number, fd)
        self._write(fd, b"".join(prefix + line + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """Write a line of our own to stderr."""
        line = f"launcher: {printable(text)}\n"
        self._write(STDERR, line.encode("utf-8", "backslashreplace"))

    def show(self, text: str) -> None:
        """Write a text of our own to stdout, its lines as they are."""
        self._write(STDOUT, os.fsencode(text))

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
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
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
