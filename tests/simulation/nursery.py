"""A simulated nursery: the process of a warm host that forks torchrun and ranks.

As launcher/run/nursery.py has it: it forks one after the other, and answers each time whether the
launcher knows the fork. What it forks is the launcher's child at once, which is sooner than there.
"""

from __future__ import annotations

import selectors
import signal
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from simulation.machine import Machine, Process
from simulation.plan import Moment, Nursing, What
from simulation.ranks import Rank, World
from simulation.starting import Start
from simulation.system import Ready

if TYPE_CHECKING:
    from simulation.torchrun import Torchrun

# In seconds.
IMPORTS = (0.4, 1.5)  # until it is ready
LATE = 300.0  # more, of one that is late
FORK = (0.001, 0.01)  # until a fork can say its pid
ANSWERS = (0.0002, 0.003)  # until the other end acts on what it hears


class Line(Ready):
    """The launcher's end of the connection to a nursery, and what System.start_helper returns."""

    def __init__(self, nursery: Nursery, take: Callable[[Mapping[str, Any] | None], None]) -> None:
        launcher = nursery.machine.launcher
        assert launcher
        self._nursery, self._take = nursery, take
        self._system = launcher.system
        self._messages: deque[Mapping[str, Any]] = deque()
        self._is_open, self._is_at_end = True, False
        self.pid = nursery.pid
        self._system.selector.register(self, selectors.EVENT_READ, self._read)

    def is_ready(self) -> bool:
        return bool(self._messages) or self._is_at_end

    def comes(self, message: Mapping[str, Any] | None) -> None:
        """The nursery says something, or hangs up."""
        if message is None:
            self._is_at_end = True
        else:
            self._messages.append(message)
        self.wake()

    def _read(self) -> None:
        if not self._messages:
            self._take(None)
        while self._messages:
            self._take(self._messages.popleft())

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message; return whether it has been taken."""
        if not self._nursery.runs:
            return False
        self._nursery.after(FORK, self._nursery.hears, message)
        return True

    def close(self, *, kill: bool = True) -> None:
        """Kill the nursery, unless it has ended, and hear of it no more."""
        if self._is_open:
            self._is_open = False
            self._system.selector.unregister(self)
            if kill:
                self._nursery.signal(signal.SIGKILL)


class Nursery(Process):
    """The process, which never outlives its launcher. Attributes: `line`, to that."""

    def __init__(self, machine: Machine, take: Callable[[Mapping[str, Any] | None], None]) -> None:
        super().__init__(machine, None)
        self.attempt = -1  # it is none's
        self.is_spared = True
        self.line = Line(self, take)
        self._forks: list[Fork] = []  # that are not answered
        more = LATE if self.job.of(machine, What.NURSERY_LATE) else 0.0
        self.after((IMPORTS[0] + more, IMPORTS[1] + more), self._imported)

    def after(self, within: tuple[float, float], act: Callable[..., None], *given: Any) -> None:
        """Do something in a while, if it still runs; a slow host stretches all but answers."""
        seconds = self.job.random.uniform(*within)
        slow = self.job.of(self.machine, What.STARTS_SLOWLY)
        # It answers before it forks anything else.
        stretches = slow and within is not ANSWERS
        seconds += self.job.random.uniform(0, slow.amount) if slow and stretches else 0
        self.clock.after(seconds, lambda: act(*given) if self.runs else None)

    def dies(self, moment: Nursing) -> bool:
        """Die if the plan says so; tell whether it does, or has."""
        fault = self.job.of(self.machine, What.NURSERY_DIES)
        is_it = fault and fault.amount == moment.value and fault.at <= self.clock.now
        if is_it and self.runs:
            self.job.watch.note(f"the nursery dies: {moment.name}", self.machine.name)
            self.end(-signal.SIGKILL)
        return not self.runs

    def _imported(self) -> None:
        if self.job.of(self.machine, What.NURSERY_UNFIT):
            self.line.comes({"unfit": "an import has started a thread (2 are running)"})
            self.end(0)
        elif not self.dies(Nursing.IMPORTING):
            self.line.comes({"ready": True})
            self.dies(Nursing.READY)

    # torchrun

    def hears(self, order: Mapping[str, Any]) -> None:
        """Fork a torchrun."""
        if self.dies(Nursing.ORDERED):
            return
        torchrun = self.job.start_torchrun(self.machine, order["environment"], self)
        if torchrun is None:
            self.line.comes({"forked": False})
        else:
            self.dies(Nursing.FORKED)

    def knows_torchrun(self, *, runs: bool) -> None:
        """The torchrun has said its pid to the launcher, or has ended before."""
        self.after(ANSWERS, self._answers, runs)

    def _answers(self, runs: bool) -> None:
        if not self.dies(Nursing.FORKED_AND_SAID):
            self.line.comes({"forked": runs})
            self.dies(Nursing.TOLD)

    # Ranks

    def forks(self, fork: Fork) -> None:
        """Fork a rank."""
        if self.dies(Nursing.BEFORE_A_RANK):
            fork.answered(False)
        else:
            self._forks.append(fork)
            self.after(FORK, fork.begin)

    def answers(self, fork: Fork, *, has_said: bool) -> None:
        """Tell a torchrun whether there is such a rank."""
        if fork in self._forks:
            self._forks.remove(fork)
            fork.answered(has_said)
            self.dies(Nursing.BETWEEN_RANKS)

    def on_end(self) -> None:
        """Have the kernel tell those who wait for it."""
        self.line.comes(None)
        forks, self._forks = self._forks, []
        for fork in forks:
            fork.answered(False)


class Fork(Start):
    """How a rank comes to be that the nursery forks: without a first process of torchrun's."""

    runs = False
    exit_code: int | None = None

    def __init__(
        self,
        nursery: Nursery,
        torchrun: Torchrun,
        world: World,
        rank: int,
        local_rank: int,
        then: Callable[[bool], None],
    ) -> None:
        self.machine, self.job, self.clock = torchrun.machine, torchrun.job, torchrun.clock
        self.folder = torchrun.folder
        self.torchrun, self.rank, self.local_rank = torchrun, rank, local_rank
        self.pid, self.started = 0, self.clock.now
        self.process: Rank | None = None
        self.nursery, self._world, self._then = nursery, world, then
        nursery.forks(self)

    def begin(self) -> None:
        """Be forked."""
        self.process = Rank(self, self._world)
        self.nursery.dies(Nursing.IN_A_FORK)

    def dies(self, moment: Moment, process: Process) -> bool:
        """Die as planned, but not before the pid is said: that would do no harm."""
        return not process.runs if moment is Moment.FORKED else super().dies(moment, process)

    def knows(self) -> None:
        """The fork has said its pid to the launcher, and does so to a nursery that is there."""
        self.nursery.answers(self, has_said=True)

    def fork_ended(self, exit_code: int) -> None:
        """It has, and may not have said its pid."""
        self.nursery.answers(self, has_said=False)

    def answered(self, has_said: bool) -> None:
        """The torchrun hears of it."""
        self.clock.after(self.job.random.uniform(*ANSWERS), self._then, has_said)
