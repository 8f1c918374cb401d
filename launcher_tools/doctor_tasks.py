"""Looks at several things side by side, none of which can hold up the others."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
import time
from collections.abc import Collection
from typing import Any, Callable

from launcher.signals import Signals


class Stopped(Exception):
    """A stop came; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Tasks:
    """Functions that run in threads of their own, which end with this process at the latest."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
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
        self._button.send(b"\0")

    def wait(self, names: Collection[str], seconds: float) -> None:
        """Wait until these have ended, but no longer; raise what they raised, and Stopped."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            while self._running & set(names) and time.monotonic() < deadline:
                selector.select(max(0.0, deadline - time.monotonic()))
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
                self._take_stops()
        for name in names:
            if name in self._errors:
                raise self._errors[name]

    def result(self, name: str, otherwise: Any) -> Any:
        """Return what a function returned by now, or something else if it has not."""
        return self._results.get(name, otherwise)

    def has_ended(self, name: str) -> bool:
        """Tell whether a function has ended by now."""
        return name not in self._running

    def _take_stops(self) -> None:
        for number in self._signals.take():
            if number != signal.SIGCHLD:
                raise Stopped(number)
