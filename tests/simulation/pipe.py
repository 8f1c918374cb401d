"""What a simulated rank or torchrun says to its launcher, and hears: lines of JSON."""

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
    """A connection to the launcher of a machine, if it runs; `hears` gets each of its answers."""

    def __init__(
        self, machine: Machine, hears: Callable[[dict[str, Any]], None] = lambda message: None
    ) -> None:
        self._machine, self._hears = machine, hears
        self._back = Lane(machine.job.clock)
        self._end = End(self._answers, lambda: None)
        launcher = machine.launcher
        self._runs = launcher is not None and launcher.runs
        if launcher and launcher.runs:
            launcher.system.local.add(self._end)

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        if self._runs:
            self._end.comes(encoded(message))

    def close(self) -> None:
        """Hang up."""
        if self._runs:
            self._end.loses()

    def breaks(self, act: Callable[[], None]) -> None:
        """The launcher is gone: act when all is heard that it has said before."""
        self._back.after(0, act)

    def _answers(self, data: bytes) -> None:
        for line in data.splitlines():
            seconds = self._machine.job.random.uniform(*TAKES)
            self._back.after(seconds, self._hears, decoded(line))
