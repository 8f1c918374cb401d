"""What somebody on a host says to its launcher, and hears: lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from launcher.text.protocol import decoded, encoded
from simulation.clock import Lane
from simulation.system import End

if TYPE_CHECKING:
    from simulation.machine import Machine

TAKES = (0.0005, 0.003)  # seconds, until it acts on what it hears


class Pipe:
    """A connection to the launcher of a machine.

    `hears` gets each of its messages, `loses` is called when the launcher's end is closed.
    `is_open` tells whether there is such a connection.
    """

    def __init__(
        self,
        machine: Machine,
        hears: Callable[[dict[str, Any]], None] = lambda message: None,
        loses: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine, self._hears, self._loses = machine, hears, loses
        self._back = Lane(machine.job.clock)
        self._end = End(self._comes, self._closes)
        launcher = machine.launcher
        listener = launcher.system.listener if launcher and launcher.runs else None
        self.is_open = listener is not None and listener.is_open
        if listener and self.is_open:
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

    def _comes(self, data: bytes) -> None:
        for line in data.splitlines():
            seconds = self._machine.job.random.uniform(*TAKES)
            self._back.after(seconds, self._heard, decoded(line))

    def _heard(self, message: dict[str, Any]) -> None:
        if self.is_open:
            self._hears(message)
