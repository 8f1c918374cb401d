"""What one launcher sees of its ranks and its torchrun: to hold simulated jobs to real ones.

Of each rank, and of torchrun, it is what happens to it, in order. What happens to two of them at
the same time has no order between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.run.events import (
    ExitCodes,
    RankGone,
    RankIsFinal,
    RankSaid,
    RankStarted,
    Signal,
    TorchrunAsks,
    TorchrunEnded,
    TorchrunStarts,
)

Life = list[tuple[Any, ...]]


class Lives:
    """Takes in what one launcher hears; `of` maps ranks, "torchrun" and "launcher" to lives."""

    def __init__(self, events: Iterable[tuple[Any, str]]) -> None:
        self.of: dict[Any, Life] = {"torchrun": [], "launcher": []}
        self._ranks: dict[int, int] = {}  # by pid
        self._latest: dict[int, int] = {}  # pids by local rank
        for event, phase in events:
            self._take_in(event)
            phases = self.of["launcher"]
            # Which of two hosts waits for the other at the end is a matter of milliseconds: their
            # torchruns have met in the exit barrier.
            if phase != "waiting" and phases[-1:] != [(phase,)]:
                phases.append((phase,))

    def _take_in(self, event: Any) -> None:
        if isinstance(event, RankStarted):
            self._ranks[event.pid] = event.rank
            self._latest[event.local_rank] = event.pid
            self.of.setdefault(event.rank, []).append(("starts", event.restart))
        elif isinstance(event, RankSaid):
            chain = [link.exception for link in event.chain]
            self._happens(event.pid, "says", event.exit_code, *chain)
        elif isinstance(event, RankIsFinal):
            self._happens(event.pid, "is certain")
        elif isinstance(event, RankGone):
            self._ends(event.pid, event.exit_code)
        elif isinstance(event, ExitCodes):
            for local_rank, code in event.codes.items():
                if local_rank in self._latest:
                    self._ends(self._latest[local_rank], code)
        elif isinstance(event, TorchrunAsks):
            self.of["torchrun"].append(("asks", event.why.value))
        elif isinstance(event, TorchrunStarts):
            self.of["torchrun"].append(("starts again",))
        elif isinstance(event, TorchrunEnded):
            self.of["torchrun"].append(("ends", event.returncode))
        elif isinstance(event, Signal):
            self.of["launcher"].append(("hears", int(event.number)))

    def _happens(self, pid: int, *what: Any) -> None:
        self.of[self._ranks[pid]].append(what)

    def _ends(self, pid: int, code: int | None) -> None:
        """Note its end, of which two tell: its connection, and torchrun, which knows the code.

        Nobody tells of a success whose process torchrun has reaped before the launcher could look.
        """
        life = self.of[self._ranks[pid]]
        if life[-1][0] != "ends":
            life.append(("ends", code or 0))
        elif life[-1] == ("ends", 0):
            life[-1] = ("ends", code or 0)
