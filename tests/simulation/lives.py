"""What one launcher sees of its ranks and its torchrun: to hold simulated jobs to real ones.

Of each rank, and of torchrun, it is what happens to it, in order. What happens to two of them at
the same time has no order between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.run import events

Life = list[tuple[Any, ...]]


class Lives:
    """Takes in what one launcher hears; `of` maps ranks, "torchrun" and "launcher" to lives."""

    def __init__(self, heard: Iterable[tuple[Any, str]]) -> None:
        self.of: dict[Any, Life] = {"torchrun": [], "launcher": []}
        for event, phase in heard:
            self._take_in(event)
            phases = self.of["launcher"]
            if phases[-1:] != [(phase,)]:
                phases.append((phase,))

    def _take_in(self, event: Any) -> None:
        if isinstance(event, events.KeeperJoined):
            self._happens(event.rank, "joins", event.local_rank, event.nproc)
        elif isinstance(event, events.RankRuns):
            self._happens(event.rank, "runs")
        elif isinstance(event, events.RankExits):
            chain = [link.exception for link in event.chain]
            self._happens(event.rank, "says", event.exit_code, *chain)
        elif isinstance(event, events.ScriptEnded):
            self._happens(event.rank, "is through")
        elif isinstance(event, events.RankEnded):
            # The job's end may reach a rank's keeper before what the rank says, or after it.
            has_said = any(what[0] == "says" for what in self.of[event.rank])
            response = None if has_said else event.response
            self._happens(event.rank, "ends", event.exit_code, response)
        elif isinstance(event, events.KeeperCleared):
            self._happens(event.rank, "clears", event.number, event.survivors)
        elif isinstance(event, events.KeeperLost):
            self._happens(event.rank, "loses", event.is_gone)
        elif isinstance(event, events.TorchrunEnded):
            # It may be killed before it has seen that its child has ended.
            self._happens("torchrun", "ends", event.returncode == 0)
        elif isinstance(event, events.Signal):
            self._happens("launcher", "hears", int(event.number))

    def _happens(self, whose: Any, *what: Any) -> None:
        self.of.setdefault(whose, []).append(what)
