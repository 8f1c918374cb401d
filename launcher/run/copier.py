"""Copies what ranks write from their files to the console, in a process beside the launcher.

Executed by path, with --launcher-log-dir alone; its arguments are `prefix`, to have `[rank 5] `
before each line, or `plain`, and the descriptor of its socket to the launcher. No rank ever waits
for it, and what becomes of it costs the console alone.

It copies whole lines. Of a line that has not ended, such as a progress bar, what a terminal would
show of it comes at most once a second. It ends when the launcher tells it to, or is gone, once all
is copied; a console that does not take that in time gets the end of each file.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import sys
import time
from typing import Any

_POLL_SECONDS = 0.1
_BAR_SECONDS = 1.0  # between two polls of a line that has not ended
_GONE_SECONDS = 1.0  # to copy what is there, once the launcher is gone
_TAIL_SECONDS = 0.25  # for the ends of files that the time was too short for
_TAIL = 1 << 14  # bytes: such an end
_READ = 1 << 18  # bytes of a file at a time
_LINE = 1 << 16  # bytes of a line; a longer one comes as several
_PIECE = select.PIPE_BUF  # a pipe that is ready takes so much without a wait, and in one piece
_OVERWRITTEN = re.compile(rb"(?m)^[^\n]*\r(?!\n)")  # from `^`: else it takes n² for a long line
# Of those that come to all processes of a job, or of a group: this one ends with the launcher.
IGNORED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
IGNORED += [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE]


class TimeIsOver(Exception):
    """The console has not taken all in time; has what is not written, or how much of a file."""


class Launcher:
    """The launcher's commands; `ends_at` is when the time is over that there is to copy."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.ends_at = float("inf")
        self.is_ending = False
        self.messages: list[dict[str, Any]] = []
        self._rest = b""

    def read(self) -> None:
        """Take in what it has said."""
        data = os.read(self.descriptor, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "end" in message:
                self._end(message["end"])
            else:
                self.messages.append(message)
        if not data:
            self._end(_GONE_SECONDS)

    def _end(self, seconds: float) -> None:
        if not self.is_ending:
            self.is_ending, self.ends_at = True, time.monotonic() + seconds

    def wait(self, seconds: float) -> None:
        """Wait for what it says, or so long."""
        if self.is_ending:
            return  # nothing of what comes now counts
        if select.select([self.descriptor], [], [], seconds)[0]:
            self.read()

    def reply(self, message: dict[str, Any]) -> None:
        """Say something; it may be gone."""
        try:
            os.write(self.descriptor, json.dumps(message).encode() + b"\n")
        except OSError:
            pass


class Console:
    """Where lines go. `line` is whose line the cursor is in, None at the beginning of one."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.line: Lines | None = None

    def write(self, data: bytes) -> None:
        """Write it in pieces of whole lines: others write there, too. Raises TimeIsOver."""
        at = 0
        while at < len(data):
            end = min(at + _PIECE, len(data))
            if end < len(data):
                end = data.rfind(b"\n", at, end) + 1 or end
            if not self._is_ready():
                raise TimeIsOver(data[at:])
            try:
                at += os.write(1, data[at:end])
            except BlockingIOError:
                time.sleep(0.01)  # it said that it was ready
            except OSError:
                at = end  # nobody reads it, a disk is full: the file has it

    def _is_ready(self) -> bool:
        """Wait until the console takes something; return False if the time is over before."""
        launcher = self._launcher
        while True:
            listens = [] if launcher.is_ending else [launcher.descriptor]
            seconds = min(3600.0, max(0.0, launcher.ends_at - time.monotonic()))
            hears, takes, _ = select.select(listens, [1], [], seconds)
            if hears:
                launcher.read()
            if takes:
                return True
            if time.monotonic() >= launcher.ends_at:
                return False

    def end_line(self) -> None:
        """Have what comes next begin a line."""
        if self.line:
            self.line = None
            self.write(b"\n")


class Lines:
    """One rank's output on its way to the console."""

    def __init__(self, console: Console, prefix: bytes) -> None:
        self._console, self._prefix = console, prefix
        self._rest = b""  # a line that has not ended
        self._shown = b""  # what is on the console of that
        self._due = time.monotonic() + _BAR_SECONDS  # when more of it may be shown

    def feed(self, data: bytes) -> None:
        """Take what comes next; write the lines that have ended."""
        text = self._rest + data
        end = text.rfind(b"\n") + 1
        lines, rest = text[:end], text[end:]
        if b"\r" in rest:  # what it overwrites is gone; the last may belong to a newline
            rest = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]
        if len(rest) > _LINE:
            lines, rest = lines + rest + b"\n", b""
        self._rest = rest
        if lines:
            self._write(_OVERWRITTEN.sub(b"", lines) if b"\r" in lines else lines)

    def _write(self, lines: bytes) -> None:
        shown, self._shown = self._shown, b""
        if self._console.line is not self:
            self._console.end_line()
        elif lines.startswith(shown):  # the rest of a line
            first, newline, lines = lines[len(shown) :].partition(b"\n")
            self._console.write(first + newline)
        else:
            self._console.write(b"\r")
        self._console.line = None
        if lines:
            prefix = self._prefix
            if prefix:
                lines = prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
            try:
                self._console.write(lines)
            except TimeIsOver as error:
                left = error.args[0]
                raise TimeIsOver(len(left) - left.count(b"\n") * len(prefix)) from None

    def drop(self) -> int:
        """Forget a line that has not ended; return how long it is."""
        rest, self._rest = self._rest, b""
        return len(rest)

    def show(self, now: float) -> None:
        """Write what is there of a line that has not ended, if that is due."""
        if not self._rest:
            self._due = now + _BAR_SECONDS
        if now < self._due:
            return
        self._due = now + _BAR_SECONDS
        text = self._rest.rstrip(b"\r").rpartition(b"\r")[2]
        if text == self._shown or not text.strip():
            return
        if self._console.line is not self:
            self._console.end_line()
            self._console.write(self._prefix + text)
        elif text.startswith(self._shown):
            self._console.write(text[len(self._shown) :])
        else:
            self._console.write(b"\r" + self._prefix + text)
        self._shown, self._console.line = text, self


class File:
    """A rank's file, from where it is `at`; it need not be there yet. `wanted`: up to where."""

    def __init__(self, rank: int, path: str, at: int, console: Console, prefix: bytes) -> None:
        self.rank, self.path, self._at = rank, path, at
        self.lines = Lines(console, prefix)
        self.is_old = False  # of an attempt that is over
        self.wanted = 0
        self._file = -1

    def open(self) -> bool:
        """Open it; return whether it is there."""
        if self._file >= 0:
            return True
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode) or os.path.samestat(seen, os.fstat(1)):
            os.close(file)
            return False
        self._file = file
        return True

    def copy(self) -> bool:
        """Copy some of what is new; return whether there was anything. Raises TimeIsOver."""
        if not self.open():
            return False
        try:
            data = os.pread(self._file, _READ, self._at)
            if not data and self.size < self._at:  # somebody has emptied it
                self._at = 0
        except OSError:  # the folder's server does not answer: perhaps later
            return False
        if not data:
            return False
        self._at += len(data)
        try:
            self.lines.feed(data)
        except TimeIsOver as error:
            left = error.args[0]
            self._at -= self.lines.drop() + (left if isinstance(left, int) else len(left))
            raise
        return True

    @property
    def size(self) -> int:
        """Its length now."""
        return os.fstat(self._file).st_size if self.open() else 0

    @property
    def is_copied(self) -> bool:
        """Whether as much as was wanted is."""
        return self._at >= min(self.wanted, self.size)

    def skip(self) -> int:
        """Go on at the last lines; return how many bytes are left out."""
        size, before = self.size, self._at - self.lines.drop()
        if size - before > _TAIL:
            data = os.pread(self._file, _TAIL, size - _TAIL)
            self._at = size - _TAIL + data.find(b"\n") + 1
        else:
            self._at = before
        return self._at - before

    def close(self) -> None:
        """Close it."""
        if self._file >= 0:
            os.close(self._file)


class Copier:
    """All files of this host, and the console."""

    def __init__(self, launcher: Launcher, *, has_prefix: bool) -> None:
        self._launcher, self._has_prefix = launcher, has_prefix
        self._console = Console(launcher)
        self._files: dict[str, File] = {}
        self._sync: int | None = None  # the number of a request that has no reply yet

    def run(self) -> None:
        """Copy until the launcher wants the end."""
        try:
            while True:
                is_ending = self._launcher.is_ending  # then all is there that is to come
                has_more = self._copy()
                if is_ending and not has_more:
                    break
                if time.monotonic() >= self._launcher.ends_at:
                    raise TimeIsOver
                self._reply()
                self._launcher.wait(0 if has_more else _POLL_SECONDS)
                self._take()
            for file in self._files.values():
                file.lines.show(float("inf"))
            self._console.end_line()
        except TimeIsOver:
            self._write_ends()

    def _copy(self) -> bool:
        has_more, now = False, time.monotonic()
        for file in [*self._files.values()]:
            is_new = file.copy()
            has_more |= is_new
            file.lines.show(now)
            if file.is_old and not is_new:
                file.close()
                del self._files[file.path]
        return has_more

    def _take(self) -> None:
        """Take in what the launcher has said."""
        for message in self._launcher.messages:
            if "sync" in message:
                self._sync = message["sync"]
                for file in self._files.values():
                    file.wanted = file.size
                continue
            for file in self._files.values():
                file.is_old = True
            for rank, path, at in message["files"]:
                prefix = f"[rank {rank}] ".encode() if self._has_prefix else b""
                new = File(rank, path, at, self._console, prefix)
                self._files.setdefault(path, new).is_old = False
        self._launcher.messages.clear()

    def _reply(self) -> None:
        if self._sync is not None and all(file.is_copied for file in self._files.values()):
            self._console.end_line()
            self._launcher.reply({"synced": self._sync})
            self._sync = None

    def _write_ends(self) -> None:
        """Write the last lines of each file, and how much is left out before them."""
        self._launcher.ends_at = time.monotonic() + _TAIL_SECONDS
        try:
            for file in self._files.values():
                left_out = file.skip()
                if left_out:
                    self._console.end_line()
                    what = f"{left_out} bytes of rank {file.rank}'s output are not shown here"
                    line = f"launcher: {what}, because the console is slow; {file.path} has them.\n"
                    self._console.write(os.fsencode(line))
                while file.copy():
                    pass
                file.lines.show(float("inf"))
            self._console.end_line()
        except TimeIsOver:
            os._exit(1)


def main() -> None:
    """Copy; what ends other processes of the job does not end this one."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    how, descriptor = sys.argv[1:]
    Copier(Launcher(int(descriptor)), has_prefix=how == "prefix").run()


if __name__ == "__main__":
    main()
    os._exit(0)
