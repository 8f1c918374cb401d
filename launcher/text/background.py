"""Threads beside the loop, for what may take long, or hang: look-ups, readers, disks."""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
from typing import Callable, TypeVar

T = TypeVar("T")


def start(function: Callable[[], object]) -> threading.Thread:
    """Call a function in a thread that takes no signals, and does not outlive this process.

    All signals go to the loop's thread: so it finds a stop before what that has ended. Raises
    RuntimeError if this container allows no more threads.
    """
    thread = threading.Thread(target=function, daemon=True)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # which it inherits
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return thread


def within(seconds: float, function: Callable[[], T], otherwise: T) -> T:
    """Return a function's result, or `otherwise` if it takes longer than `seconds`.

    Return `otherwise`, too, if no thread can be started.
    """
    found: list[T] = []
    try:
        start(lambda: found.append(function())).join(seconds)
    except RuntimeError:
        pass
    return found[0] if found else otherwise


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
            self._thread = self._thread or start(self._run)
            self._queue.put(data)
        except RuntimeError:
            self._write(data)

    def _run(self) -> None:
        while True:
            self._write(self._queue.get())
            self._queue.task_done()

    def flush(self, seconds: float = 1.0) -> None:
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
