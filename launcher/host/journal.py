"""DIR/HOST/events.jsonl: what this launcher records about its job (text/notes.py)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from typing import Callable

from launcher.text.notes import Note
from launcher.text.words import shortened
from launcher.text.writer import Writer

NAME = "events.jsonl"
_END_SECONDS = 1.0  # to write the last lines
_LONGEST_CAUSE = 600  # characters


def host_folder(folder: str, host: str) -> str:
    """Return DIR/HOST, the folder for a host's events and its ranks' output."""
    return os.path.join(folder, host.replace("/", "_"))


class Journal:
    """The file, to which a thread appends each line at once.

    Its errors never cost the job: the folder may be on another machine, and hang.
    """

    def __init__(self, folder: str, host: str, began: float, log: Callable[[str], None]) -> None:
        self._host, self._began, self._log = host, began, log
        self._path = os.path.join(host_folder(folder, host), NAME)
        self._file: io.FileIO | None = None
        self._writer = Writer(self._write) if folder else None  # None also after an error

    def note(self, note: Note, attempt: int, now: float) -> None:
        """Write a line about something that happens now, in an attempt."""
        writer = self._writer
        if writer is None:
            return
        utc = time.time()
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(utc))
        cause = note.cause.partition("\n")[0].removeprefix("launcher: ")
        note = note._replace(
            host=note.host or self._host,
            cause=shortened(cause, _LONGEST_CAUSE),
            since=None if note.since is None else round(note.since - self._began, 3),
        )
        line = {
            "utc": f"{second}.{int(utc % 1 * 1000):03d}Z",
            "seconds": round(now - self._began, 3),
            "attempt": attempt,
        }
        for name, value in note._asdict().items():
            if name == "rank" or value not in (None, "", ()):
                line[name] = value
        writer.add((json.dumps(line) + "\n").encode())

    def _write(self, data: bytes) -> None:
        if self._writer is None:
            return
        with self._no_errors():
            self._file = self._file or self._opened()
            while data:
                data = data[os.write(self._file.fileno(), data) :]

    def _opened(self) -> io.FileIO:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        # A pipe without a reader may have this name: do not wait for it.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        file = io.FileIO(os.open(self._path, flags, 0o644), "r+")
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            os.write(file.fileno(), b"\n")  # after a line that a full disk has cut off
        return file

    @contextlib.contextmanager
    def _no_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a read-only folder, our own bug
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._log(f"cannot write {self._path} ({why}); the job continues without it.")
            self._writer = None

    def close(self) -> None:
        """Wait until all is written, but not for a folder that hangs."""
        if self._writer:
            self._writer.flush(_END_SECONDS)
