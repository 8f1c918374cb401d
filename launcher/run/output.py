"""A rank's output, on its way to the console and to a file of its own.

Imported by keeper.py, in the keeper's process: it needs no package of ours. Each line reaches the
console in one write, so that ranks' lines are never torn; none of these writes blocks.
"""

from __future__ import annotations

import _socket
import os
import select
import stat
import time

from bars import NEVER, Bars  # type: ignore[import-not-found]  # beside this file
from lines import suppress  # type: ignore[import-not-found]

PARTIAL_SECONDS = 0.2  # until text without a line end is shown
READ = 1 << 16  # bytes at a time
# Bytes that may wait for a console. A rank with a file never waits for the console.
_WAITING, _WAITING_WITH_FILE = 1 << 16, 1 << 22
_READS = 16  # of READ bytes: a pipe holds no more


class Console:
    """The destination of a stream's lines: a descriptor of this process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.waiting, self.left_out = descriptor, bytearray(), 0
        mode = os.fstat(descriptor).st_mode
        self._socket = _socket.socket(fileno=os.dup(descriptor)) if stat.S_ISSOCK(mode) else None
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            with suppress(OSError):  # another user's; without a reader
                # Open it anew: then other processes do not get the flag.
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
                self.descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)

    def write(self, data: bytes = b"") -> None:
        """Write what the console takes, in pieces of whole lines; the rest waits."""
        self.waiting += data
        while self.waiting:
            # A pipe takes so much in one piece, even with other writers.
            end = len(self.waiting)
            if end > select.PIPE_BUF:
                end = self.waiting.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
            # One that could not be opened anew does so without blocking, if it is ready.
            if not select.select([], [self.descriptor], [], 0)[1]:
                return
            try:
                piece = bytes(self.waiting[:end])
                if self._socket:  # another process may have filled it meanwhile
                    count = self._socket.send(piece, _socket.MSG_DONTWAIT)
                else:
                    count = os.write(self.descriptor, piece)
            except BlockingIOError:
                return
            except OSError:  # no reader, a full disk
                count = len(self.waiting)
            del self.waiting[:count]

    def drain(self, deadline: float) -> None:
        """Wait until the console has taken all; drop what it has not at the deadline."""
        self.write()
        while self.waiting and (seconds := deadline - time.monotonic()) > 0:
            select.select([], [self.descriptor], [], seconds)
            self.write()
        self.leave_out(0)

    def leave_out(self, most: int) -> None:
        """Drop what waits beyond a number of bytes, the oldest lines first."""
        if len(self.waiting) > most:
            end = self.waiting.find(b"\n", len(self.waiting) - most) + 1 or len(self.waiting)
            self.left_out += end
            del self.waiting[:end]


class Stream:
    """A pipe that is the script's stdout, stderr, or both, to its end.

    Every byte goes to the file, too; and to the console, if it `shows` this rank. Progress bars
    reach one that `has_bars` unchanged, other consoles as lines (bars.py).
    """

    def __init__(
        self, reader: int, console: Console, file: int, prefix: bytes, shows: bool, has_bars: bool
    ) -> None:
        os.set_blocking(reader, False)
        self.reader, self._is_open = reader, True
        self.console, self._file, self._prefix = console, file, prefix
        self._shows, self._has_bars = shows, has_bars
        self.tail, self.read_at = b"", 0.0  # the end of all output, and when it was read
        self._rest, self._is_in_line = b"", False
        self._rest_due = NEVER  # when text without a line end is shown
        self._bars = Bars()

    @property
    def is_read(self) -> bool:
        """Whether to read more now: not while the console is full."""
        is_full = self._file < 0 and len(self.console.waiting) >= _WAITING
        return self._is_open and not is_full

    def read(self, now: float) -> None:
        """Read what is there, or much of it."""
        try:
            data = os.read(self.reader, READ)
        except BlockingIOError:
            return
        self._is_open = bool(data)
        if not data:
            return
        self.tail, self.read_at = (self.tail + data)[-READ:], now or NEVER
        if self._file >= 0:
            with suppress(OSError):  # a full disk
                os.write(self._file, data)
        self._take(self._rest + data, now)

    def _take(self, text: bytes, now: float) -> None:
        """Process text that was not shown yet."""
        end = text.rfind(b"\n") + 1
        if not self._has_bars and self._bars.takes(text):
            end = len(text)
            self._show_lines(self._bars.feed(text, now))
        else:
            self._show(text[:end])
        self._rest = text[end:]
        begun = NEVER if end else self._rest_due  # when its first part is shown
        self._rest_due = min(begun, now + PARTIAL_SECONDS) if self._rest else NEVER
        if len(self._rest) > _WAITING:
            self._show_rest()

    @property
    def due(self) -> float:
        """When something must be shown even without more input."""
        return float(min(self._rest_due, self._bars.due))

    def show_due(self, now: float) -> None:
        """Show text without a line end, and bars' states, if it is time."""
        if now >= self._rest_due:
            if self._rest.endswith(b"\r") and not self._has_bars:  # and no line end after that
                self._take(self._rest + b"\r", now)
            else:
                self._show_rest()
        if now >= self._bars.due:
            self._show_lines(self._bars.states(now))

    def _show_rest(self) -> None:
        text, self._rest, self._rest_due = self._rest, b"", NEVER
        self._show(text)

    def _show_lines(self, lines: bytes) -> None:
        self._show((b"\n" if lines and self._is_in_line else b"") + lines)

    def _show(self, text: bytes) -> None:
        if not (text and self._shows):
            return
        if self._prefix:
            begin = b"" if self._is_in_line else self._prefix
            text = begin + text[:-1].replace(b"\n", b"\n" + self._prefix) + text[-1:]
        self._is_in_line = not text.endswith(b"\n")
        self.console.write(text)
        if self._file >= 0:
            self.console.leave_out(_WAITING_WITH_FILE)

    def finish(self, deadline: float) -> int:
        """Read the rest until the deadline; return how many bytes the console did not take."""
        for _ in range(_READS):  # not to the end: a process that still runs may write on
            self.read(0.0)
            if not self.is_read:
                self.console.drain(deadline)
        self._show_rest()
        self._show_lines(self._bars.states(0.0))
        if self._is_in_line:  # what others write now would be in this line, too
            self._show(b"\n")
        self.console.drain(deadline)
        count, self.console.left_out = self.console.left_out, 0
        return count


def open_file(path: str) -> int:
    """Open the file that a rank writes to. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would block, or lose bytes
        raise OSError(0, "it is not a file")
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
