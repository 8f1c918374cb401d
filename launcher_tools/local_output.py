"""What is printed: the hosts' lines, each after its host's name, progress bars, and our own lines.

Hosts write to their logs, and the loop reads these as fast as a thread can write: so nothing waits
for a slow reader but that thread. On a terminal one bar stands below the lines; elsewhere ranks'
keepers turn bars into lines (launcher/run/bars.py).
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import time
from collections.abc import Mapping, Sequence

from launcher.errors import STOPS
from launcher.host.signals import Signals
from launcher.text.background import Writer, write_all
from launcher.text.words import printable

STDOUT, STDERR = 1, 2
LOGS = {STDOUT: "stdout.log", STDERR: "stderr.log"}  # in a host's folder
POLL_SECONDS = 0.02  # polling all logs of two hosts takes 10 microseconds
_COLOURS = (36, 33, 32, 35, 34, 31)
_CLEAR = b"\r\x1b[K"
# A terminal cuts a bar that does not fit: one that wraps could not be overwritten.
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_MOST = 64 * 1024  # bytes of an incomplete line, and of what is read at once
_MOST_WAITING = 16  # pieces of output, for a reader
_PATIENCE_SECONDS = 5


class Log:
    """A host's log of one of its streams. Text that `\\r` overwrites is gone, as on a terminal.

    `number` is the host's; `fd` is where it is printed, with a prefix before each line.
    """

    def __init__(self, number: int, fd: int, path: str, prefix: bytes) -> None:
        self.number, self.fd, self.prefix = number, fd, prefix
        self.file = os.open(path, os.O_RDONLY)  # to the very end
        self._tail = b""

    def changed(self) -> int:
        """Return when it was last written to, in nanoseconds."""
        return os.fstat(self.file).st_mtime_ns

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
    """This process's stdout and stderr, for all hosts."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.terminals = {fd for fd in (STDOUT, STDERR) if os.isatty(fd)}
        self._colours = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._logs: list[Log] = []
        self._bar: tuple[int, bytes] | None = None  # on the screen: where, and what
        self._writer = Writer(lambda data: write_all(data[0], data[1:]))
        self._patience = math.inf

    def follow(self, number: int, folder: str) -> None:
        """From now on print the logs of host algo-NUMBER."""
        for fd, name in LOGS.items():
            prefix = b"algo-%d | " % number
            if fd in self.terminals and self._colours:
                colour = _COLOURS[(number - 1) % len(_COLOURS)]
                prefix = b"\x1b[0;%dm%s\x1b[0m" % (colour, prefix)
            self._logs.append(Log(number, fd, os.path.join(folder, name), prefix))

    def read(self) -> bool:
        """Print what the logs have, as far as a reader keeps up; return whether all is printed.

        In the order of writes, as precisely as the kernel's clock tells. Of output without end it
        is a part: the loop has more to do.
        """
        for log in sorted(self._logs, key=Log.changed):
            for _ in range(_MOST_WAITING):
                if self._writer.waiting >= _MOST_WAITING:
                    return False
                data = os.read(log.file, _MOST)
                if not data:
                    break
                self._print(log, log.feed(data))
            else:
                return False
        return not self._writer.waiting

    def _print(self, log: Log, lines: Sequence[bytes]) -> None:
        self._write(log.fd, b"".join(log.prefix + line + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """Write our own line to stderr, after the hosts' output until now."""
        self.read()
        line = f"launcher: {printable(text)}\n"
        self._write(STDERR, line.encode("utf-8", "backslashreplace"))

    def hurry(self) -> None:
        """Stop waiting for a reader that has read nothing for 5 s: the job was stopped."""
        self._patience = _PATIENCE_SECONDS

    def end(self, text: str, signals: Signals) -> None:
        """Write the rest of the hosts' output, and our own text to stdout, if a reader takes it.

        A stop ends that, too.
        """
        if self._is_read(signals):
            for log in self._logs:
                self._print(log, log.end())
            self._write(STDOUT, os.fsencode(text))
            self._is_read(signals)

    def _is_read(self, signals: Signals) -> bool:
        """Wait until all is written; return False if nobody reads it, or at a stop."""
        seen, since = -1, time.monotonic()
        while not self.read():
            now = sum(os.lseek(log.file, 0, os.SEEK_CUR) for log in self._logs)
            if seen != (now := now - self._writer.waiting):
                seen, since = now, time.monotonic()
            is_stopped = any(number in STOPS for number in signals.take())
            if is_stopped or time.monotonic() > since + self._patience:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _write(self, fd: int, data: bytes) -> None:
        """Write lines above the bar, which is that of the first host that has one."""
        bar = self._next_bar()
        pieces = [(fd, data)] if data else []
        if bar != self._bar or (data and fd in self.terminals):
            gone = [(self._bar[0], _CLEAR)] if self._bar else []
            pieces = [*gone, *pieces, *([bar] if bar else [])]
        self._bar = bar
        for where, parts in itertools.groupby(pieces, key=operator.itemgetter(0)):
            # In one piece, if it is one place.
            self._writer.add(bytes([where]) + b"".join(part for _, part in parts))

    def _next_bar(self) -> tuple[int, bytes] | None:
        for log in sorted(self._logs, key=lambda log: (log.number, log.fd)):
            if log.fd in self.terminals and log.bar:
                return log.fd, _NO_WRAP + log.prefix + log.bar + _WRAP
        return None
