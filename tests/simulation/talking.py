"""How a simulated torchrun talks with the launcher: it says what it does, and asks first."""

from __future__ import annotations

import enum
import signal
from typing import Any, Callable

from launcher.run.events import (
    ExitCodes,
    TorchrunAsks,
    TorchrunEnded,
    TorchrunGone,
    TorchrunStarts,
)
from simulation.clock import Lane
from simulation.machine import Machine, Process
from simulation.ranks import NO_OOM, Rank

TAKES = (0.0005, 0.003)  # seconds, until the launcher hears what it says


class Doing(enum.Enum):
    """What a torchrun is at."""

    BOOTING = "booting"
    MEETING = "meeting"  # it waits for the other hosts' torchruns
    STARTING = "starting"  # ranks
    RUNNING = "running"
    ASKING = "asking"  # whether it may end the ranks
    CLOSING = "closing"  # it ends them
    CLEARING = "clearing"  # it asks whether it may start them again
    BARRIER = "barrier"  # all its ranks have succeeded; it waits for the other hosts', and is deaf


class Talking(Process):
    """A process that goes on from one thing to the next, and talks with the launcher.

    Attributes: `doing`, what it is at; `hangs`, it does nothing any more; `is_stuck`, it waits for
    a store that does not answer, and is as deaf; `asked`, how often it has asked: an answer to an
    earlier question is none.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, machine.runner, leads=False)
        self.doing = Doing.BOOTING
        self.hangs = self.is_stuck = False
        self.asked = 0
        self.ranks: list[Rank] = []
        self._lane = Lane(self.clock)

    def _soon(self, within: tuple[float, float], act: Callable[[], None], doing: Doing) -> None:
        """Do something in a while, if it still does what it does then."""
        seconds = self.job.random.uniform(*within)
        self.clock.after(seconds, self._go_on, act, doing, self.asked)

    def _go_on(self, act: Callable[[], None], doing: Doing, asked: int) -> None:
        awake = self.runs and not self.hangs and not self.is_stuck
        if awake and self.doing is doing and asked == self.asked:
            act()

    def _say_codes(self) -> None:
        codes = {r.local_rank: r.exit_code for r in self.ranks if r.exit_code is not None}
        if codes:
            killed = any(code == -signal.SIGKILL for code in codes.values())
            self._say(ExitCodes(codes, NO_OOM if killed else ""))

    def _say(self, event: Any) -> None:
        """Tell the launcher; without one, torchrun answers its questions itself."""
        seconds = self.job.random.uniform(*TAKES)
        if isinstance(event, (TorchrunEnded, TorchrunGone)):
            seconds = TAKES[1] + 0.001  # it is heard when all is that was said before
        launcher = self.machine.launcher
        if launcher and launcher.runs:
            self._lane.after(seconds, launcher.hear, event, self.asked)
        elif isinstance(event, (TorchrunAsks, TorchrunStarts)):
            self.clock.after(seconds, self.answered, self.asked, None)

    def answered(self, asked: int, timeout: float | None) -> None:
        """The launcher has answered."""
