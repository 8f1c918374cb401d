"""Functions that may hang, side by side: none of them can hold up doctor, or a stop."""

from __future__ import annotations

import select
import signal
import threading
import time
from typing import Any, Callable

from launcher.signals import Signals

_POLL = 0.02  # seconds


class Stopped(Exception):
    """A stop came; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Tasks:
    """Functions in threads of their own, which end with this process at the latest."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._running: set[str] = set()
        self._results: dict[str, Any] = {}
        self._errors: dict[str, Exception] = {}

    def start(self, name: str, function: Callable[[], Any]) -> None:
        """Start a function; if this container has no more threads, run it here and now."""
        thread = threading.Thread(target=self._run, args=(name, function), name=name, daemon=True)
        self._running.add(name)
        try:
            thread.start()
        except RuntimeError:
            self._run(name, function)

    def _run(self, name: str, function: Callable[[], Any]) -> None:
        try:
            self._results[name] = function()
        except Exception as error:
            self._errors[name] = error  # raised by `wait`
        self._running.discard(name)

    def wait(self, names: set[str], seconds: float) -> None:
        """Wait until these have ended, but no longer; raise what they raised, and Stopped."""
        deadline = time.monotonic() + seconds
        while self._running & names and time.monotonic() < deadline:
            select.select([self._signals], [], [], _POLL)
            for number in self._signals.take():
                if number != signal.SIGCHLD:
                    raise Stopped(number)
        for name in names & self._errors.keys():
            raise self._errors[name]

    def result(self, name: str, otherwise: Any) -> Any:
        """Return what a function returned by now, or something else if it has not."""
        return self._results.get(name, otherwise)
