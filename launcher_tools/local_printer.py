"""Prints what the hosts write into their logs, in a thread: only it waits for a slow reader."""

from __future__ import annotations

import collections
import functools
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Callable

from launcher.errors import STOPS
from launcher.signals import Signals
from launcher_tools.local_host import Host
from launcher_tools.local_output import STDERR, STDOUT, Output

_READ = 64 * 1024
_PATIENCE = 5  # seconds
_POLL = 0.02  # seconds; a look at all logs of two hosts takes 10 microseconds


class _Log:
    """One of a host's two logs, and how far it has been printed."""

    def __init__(self, host: Host, stream: int, output: Output) -> None:
        self._host = host
        self._feed = functools.partial(output.feed, host.number, stream)
        self._file = open(host.log(stream), "rb", buffering=0)  # noqa: SIM115 (to the very end)
        self.printed = 0
        self._has_ended = False

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def changed(self) -> int:
        return os.fstat(self._file.fileno()).st_mtime_ns

    def print(self, size: int) -> None:
        """Print what has come until the log had that size."""
        while self.printed < size:
            data = os.pread(self._file.fileno(), min(_READ, size - self.printed), self.printed)
            if not data:
                return
            self.printed += len(data)
            self._feed(data)

    def print_all(self) -> None:
        """Print what is there, and at the host's end also a line without its newline."""
        ends = not self._host.runs and not self._has_ended
        self.print(self.size())
        if ends:
            self._has_ended = True
            self._feed(b"")


class Printer:
    """Follows logs, from `follow` to the end of `with`, which waits until all is printed.

    Whoever reads need not do so: a stop ends that wait, and after `hurry` it takes a reader.
    """

    def __init__(self, output: Output, signals: Signals) -> None:
        self._output = output
        self._signals = signals
        self._logs: tuple[_Log, ...] = ()
        self._ours: collections.deque[tuple[Sequence[tuple[_Log, int]], Callable[[], None]]]
        self._ours = collections.deque()
        self._is_over = threading.Event()
        self._patience = math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Printer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        printed, since = -1, time.monotonic()
        while self._thread.is_alive() and time.monotonic() < since + self._patience:
            if printed != (now := sum(log.printed for log in self._logs)):
                printed, since = now, time.monotonic()
            self._thread.join(_POLL)
            if any(number in STOPS for number in self._signals.take()):
                return

    def hurry(self) -> None:
        """Wait no more for whoever has read nothing for 5 s: the job was stopped."""
        self._patience = _PATIENCE

    def follow(self, host: Host) -> None:
        """Print from now on what a host writes."""
        logs = (_Log(host, stream, self._output) for stream in (STDOUT, STDERR))
        self._logs = (*self._logs, *logs)

    def say(self, text: str) -> None:
        """Print a line of our own to stderr, behind what the hosts have written until now."""
        self._add(functools.partial(self._output.say, text))

    def show(self, text: str) -> None:
        """Print a text of our own to stdout, behind what the hosts have written until now."""
        self._add(functools.partial(self._output.show, text))

    def _add(self, act: Callable[[], None]) -> None:
        self._ours.append(([(log, log.size()) for log in self._logs], act))

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_POLL)
            while self._ours:
                sizes, act = self._ours.popleft()
                for log, size in sizes:
                    log.print(size)
                act()
            # What was written last comes last, as nearly as the kernel's clock tells.
            for log in sorted(self._logs, key=_Log.changed):
                log.print_all()
