"""DIR/HOST/events.jsonl: what this launcher notes of its job's course (run/history.py)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

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
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if folder:
            with self._no_errors():
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def note(self, of: Callable[..., Sequence[Any]], *step: Any) -> None:
        """Have the lines written that of(*step) returns (history.Note)."""
        if self._thread is None:
            return
        with self._no_errors():
            lines = of(*step)
            if lines:
                now = time.time()
                second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
                utc = {"utc": f"{second}.{int(now % 1 * 1000):03d}Z"}
                whole = [json.dumps({**utc, **line.fields}) + "\n" for line in lines]
                self._lines.put("".join(whole).encode())

    def _run(self) -> None:
        with self._no_errors(), self._opened() as file:
            while data := self._lines.get():
                while data:
                    data = data[os.write(file, data) :]

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        # It may be there already, as a pipe that nobody reads: no wait for that.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                os.write(file, b"\n")  # behind a line that a full disk has cut off
            yield file
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _no_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a folder that is read-only, a mistake of ours
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._log(f"cannot write {self._path} ({why}); the job continues without it.")
            self._thread = None
            self._lines.put(None)

    def close(self) -> None:
        """Close it, once all is written; a folder that hangs is not waited for."""
        thread, self._thread = self._thread, None
        if thread:
            self._lines.put(None)
            thread.join(_END_SECONDS)
