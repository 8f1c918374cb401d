"""DIR/HOST/events.jsonl: what this launcher notes of its job's course (run/history.py)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

NAME = "events.jsonl"


def host_folder(folder: str, host: str) -> str:
    """Return DIR/HOST, where a host writes what it notes and what its ranks print."""
    return os.path.join(folder, host.replace("/", "_"))


class Journal:
    """The file, to which lines are appended, each at once. Its troubles never cost the job."""

    def __init__(self, folder: str, host: str, log: Callable[[str], None]) -> None:
        self._file, self._log = -1, log
        self._path = os.path.join(host_folder(folder, host), NAME)
        if not folder:
            return
        with self._no_errors():
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            # It may be there already, as a pipe that nobody reads: no wait for that.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            self._file = os.open(self._path, flags, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._write(b"\n")  # behind a line that a full disk has cut off

    def note(self, of: Callable[..., Sequence[Any]], *step: Any) -> None:
        """Write the lines that of(*step) returns (history.Note)."""
        if self._file < 0:
            return
        with self._no_errors():
            lines = of(*step)
            if lines:
                now = time.time()
                second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
                utc = {"utc": f"{second}.{int(now % 1 * 1000):03d}Z"}
                whole = [json.dumps({**utc, **line.fields}) + "\n" for line in lines]
                self._write("".join(whole).encode())

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]

    @contextlib.contextmanager
    def _no_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a folder that is read-only, a mistake of ours
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._log(f"cannot write {self._path} ({why}); the job continues without it.")
            self.close()

    def close(self) -> None:
        """Close it."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)
