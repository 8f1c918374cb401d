"""A queue and a thread that writes from it: nothing else waits for a reader, or for a disk."""

from __future__ import annotations

import os
import queue
import select
import threading
from typing import Callable

from launcher.text import background


class Writer:
    """Calls write(data) for all data that is added, in order, in a thread of its own.

    If no thread can be started, add() itself calls it.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._queue: queue.Queue[bytes] = queue.Queue()
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """The number of added items that are not written yet, the current one included."""
        return self._queue.unfinished_tasks

    def add(self, data: bytes) -> None:
        """Queue data for writing."""
        try:
            self._thread = self._thread or background.start(self._run)
            self._queue.put(data)
        except RuntimeError:
            self._write(data)

    def _run(self) -> None:
        while True:
            self._write(self._queue.get())
            self._queue.task_done()

    def flush(self, seconds: float) -> None:
        """Wait until all is written, for at most `seconds`."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self.waiting, seconds)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it; a closed or full output must not cost the job."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select([], [fd], [])
        except OSError:
            return
