"""What a simulated rank or torchrun says to its launcher, and hears: lines of JSON, and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from launcher.text.protocol import decoded, encoded
from simulation.clock import Lane
from simulation.system import End

if TYPE_CHECKING:
    from simulation.machine import Machine

TAKES = (0.0005, 0.003)  # seconds, until it acts on what it hears
GO = b"go"


class Pipe:
    """A connection to the launcher of a machine, in an attempt's folder: "" is the last one.

    `hears` gets each of its answers, `loses` is called when the launcher's end is closed. `is_open`
    tells whether there is such a connection.
    """

    def __init__(
        self,
        machine: Machine,
        hears: Callable[[dict[str, Any]], None] = lambda message: None,
        loses: Callable[[], None] = lambda: None,
        folder: str = "",
        lets_go: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine, self._hears, self._loses, self._lets_go = machine, hears, loses, lets_go
        self._back = Lane(machine.job.clock)
        self._end = End(self._answers, self._closes)
        launcher = machine.launcher
        listener = launcher.system.listener(folder) if launcher and launcher.runs else None
        self.is_open = listener is not None
        if listener:
            listener.add(self._end)

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        if self.is_open:
            self._end.comes(encoded(message))

    def close(self) -> None:
        """Hang up."""
        if self.is_open:
            self.is_open = False
            self._end.loses()

    def _closes(self) -> None:
        if self.is_open:
            self._back.after(self._machine.job.random.uniform(*TAKES), self._closed)

    def _closed(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loses()

    def _answers(self, data: bytes) -> None:
        if data == GO:
            self._lets_go()
        for line in data.splitlines():
            seconds = self._machine.job.random.uniform(*TAKES)
            message = {"go": True} if line == GO else decoded(line)
            self._back.after(seconds, self._hears, message)
