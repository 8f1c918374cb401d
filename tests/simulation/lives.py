"""What one launcher sees of its ranks and its torchrun: to hold simulated jobs to real ones.

Of each rank, and of torchrun, it is what happens to it, in order. What happens to two of them at
the same time has no order between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.run.events import (
    CloseRequested,
    RankEnded,
    RankExits,
    RankRuns,
    ScriptEnded,
    Signal,
    StartRequested,
    TorchrunEnded,
)

Life = list[tuple[Any, ...]]


class Lives:
    """Takes in what one launcher hears; `of` maps ranks, "torchrun" and "launcher" to lives."""

    def __init__(self, events: Iterable[tuple[Any, str]]) -> None:
        self.of: dict[Any, Life] = {"torchrun": [], "launcher": []}
        self._ranks: dict[int, int] = {}  # by pid
        for event, phase in events:
            self._take_in(event)
            phases = self.of["launcher"]
            # Which of two hosts waits for the other at the end is a matter of milliseconds.
            if phase not in ("Waiting", "Restarting") and phases[-1:] != [(phase,)]:
                phases.append((phase,))

    def _take_in(self, event: Any) -> None:
        torchrun = self.of["torchrun"]
        if isinstance(event, RankRuns):
            self._ranks[event.pid] = event.rank
            self.of.setdefault(event.rank, []).append(("runs",))
        elif isinstance(event, RankExits):
            chain = [link.exception for link in event.chain]
            self._happens(event.pid, "says", event.exit_code, *chain)
        elif isinstance(event, ScriptEnded):
            self._happens(event.pid, "is through")
        elif isinstance(event, RankEnded):
            self._happens(event.pid, "ends", event.exit_code)
        elif isinstance(event, StartRequested):
            torchrun.append(("asks to start", len(event.ranks), event.world))
        elif isinstance(event, CloseRequested):
            # Whether it has missed a lost host's store by then is a matter of milliseconds, too.
            torchrun.append(("asks to end", event.number))
        elif isinstance(event, TorchrunEnded):
            torchrun.append(("ends", event.returncode))
        elif isinstance(event, Signal):
            self.of["launcher"].append(("hears", int(event.number)))

    def _happens(self, pid: int, *what: Any) -> None:
        self.of.setdefault(self._ranks[pid], []).append(what)
