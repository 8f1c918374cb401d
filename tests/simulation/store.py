"""What makes the ranks' stores (launcher/run/store.py): a helper of the first host's launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from simulation.faults import What

if TYPE_CHECKING:
    from simulation.machine import Machine

MAKES = (0.5, 2.0)  # seconds until the first store is made, for which torch has to be imported


class Stores:
    """It makes a store for each attempt after the first, and holds the last two."""

    def __init__(
        self, machine: Machine, name: str, take: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.machine, self._name, self._take = machine, name, take
        self.runs, self._port = True, 30000

    def send(self, line: bytes) -> bool:
        """Make a store, which takes a while; say its port, or why there is none."""
        job, made = self.machine.job, {"port": self._port}
        slow = job.of(self.machine, What.STORE_SLOW)
        seconds = (job.random.uniform(*MAKES) if self._port == 30000 else 0.0) + 0.01
        if job.of(self.machine, What.STORE_FAILS):
            made = {"port": 0, "why": "OSError: no address"}
        self._port += 1
        self._says(made, seconds + (slow.amount if slow else 0))
        return self.runs

    def _says(self, message: Mapping[str, Any], seconds: float) -> None:
        launcher = self.machine.launcher
        if launcher and launcher.runs:
            launcher.system.in_loop(seconds, self._tell, message)

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self.runs or "port" not in message:
            self._take(message)

    def die(self) -> None:
        """Be killed by somebody else; the launcher hears of it."""
        if self.runs:
            self.close()
            self._says({"why": f"{self._name} has ended"}, 0.0)

    def close(self) -> None:
        """Be killed by the launcher: ranks lose what it holds."""
        self.runs = False
        self.machine.job.loses_store(self)
