"""DIR/HOST/events.jsonl: what this launcher notes of its job's course (run/history.py)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from launcher.text.writer import Writer

NAME = "events.jsonl"
_END_SECONDS = 1.0  # for the last lines to be written


def host_folder(folder: str, host: str) -> str:
    """Return DIR/HOST, where a host writes what it notes and what its ranks print."""
    return os.path.join(folder, host.replace("/", "_"))


class Journal:
    """The file, to which a thread appends lines, each at once.

    Its troubles never cost the job: the folder may be another machine's, and hang.
    """

    def __init__(self, folder: str, host: str, log: Callable[[str], None]) -> None:
        self._log = log
        self._path = os.path.join(host_folder(folder, host), NAME)
        self._file: io.FileIO | None = None
        self._writer = Writer(self._write) if folder else None  # None after an error, too

    def note(self, of: Callable[..., Sequence[Any]], *step: Any) -> None:
        """Have the lines written that of(*step) returns (history.Note)."""
        writer = self._writer
        if writer is None:
            return
        with self._no_errors():
            lines = of(*step)
            if lines:
                now = time.time()
                second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
                utc = {"utc": f"{second}.{int(now % 1 * 1000):03d}Z"}
                whole = [json.dumps({**utc, **line.fields}) + "\n" for line in lines]
                writer.add("".join(whole).encode())

    def _write(self, data: bytes) -> None:
        if self._writer is None:
            return
        with self._no_errors():
            self._file = self._file or self._opened()
            while data:
                data = data[os.write(self._file.fileno(), data) :]

    def _opened(self) -> io.FileIO:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        # It may be there already, as a pipe that nobody reads: no wait for that.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        file = io.FileIO(os.open(self._path, flags, 0o644), "r+")
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            os.write(file.fileno(), b"\n")  # behind a line that a full disk has cut off
        return file

    @contextlib.contextmanager
    def _no_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a folder that is read-only, a mistake of ours
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._log(f"cannot write {self._path} ({why}); the job continues without it.")
            self._writer = None

    def close(self) -> None:
        """Wait until all is written; a folder that hangs is not waited for."""
        if self._writer:
            self._writer.flush(_END_SECONDS)
