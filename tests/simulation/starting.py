"""How a simulated rank comes to be: what torchrun starts forks, and the fork is the rank.

As launcher/run/rank.py has it: the first process ends with 0 once the fork has connected to the
launcher and said its pid, or as the fork does before that. A fork whose parent has ended is the
launcher's child.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Callable

from simulation.machine import Process
from simulation.plan import Moment, What
from simulation.ranks import Rank, World

if TYPE_CHECKING:
    from simulation.clock import Clock
    from simulation.job import Job
    from simulation.machine import Machine
    from simulation.torchrun import Torchrun

# In seconds.
BOOT = (0.02, 0.1)  # until the first process forks
FORK = (0.001, 0.01)  # until the fork has connected
READS = (0.0002, 0.003)  # until the first process acts on what it hears of the fork


class Start:
    """How a rank comes to be. Attributes: `process`, the rank's, once there is one."""

    machine: Machine
    job: Job
    clock: Clock
    torchrun: Torchrun
    rank: int
    local_rank: int
    folder: str
    pid: int
    started: float
    process: Rank | None

    def after(self, within: tuple[float, float], act: Callable[..., None], *given: Any) -> None:
        """Do something in a while, which a host whose ranks start slowly stretches."""
        slow = self.job.of(self.machine, What.STARTS_SLOWLY)
        most = within[1] + (slow.amount if slow else 0.0)
        self.clock.after(self.job.random.uniform(within[0], most), act, *given)

    def dies(self, moment: Moment, process: Process) -> bool:
        """Have a process die if the plan says so; tell whether it does, or has."""
        for fault in self.job.plan.faults:
            is_ours = fault.what is What.DIES_STARTING and fault.host == self.machine.number
            is_it = is_ours and fault.local_rank == self.local_rank and fault.at <= self.started
            if is_it and fault.amount == moment.value and process.runs:
                if self.job.watch.is_new(fault):
                    self.job.watch.fault(fault, self.machine, process)  # type: ignore[arg-type]
                    process.end(1 if moment is Moment.STARTED else -signal.SIGKILL)
        return not process.runs

    def knows(self) -> None:
        """The rank has said its pid to the launcher."""
        raise NotImplementedError

    def fork_ended(self, exit_code: int) -> None:
        """The rank's process has ended."""
        raise NotImplementedError


class Starter(Start, Process):
    """The process that torchrun starts; `before`: the nursery has not answered for that fork."""

    def __init__(
        self,
        torchrun: Torchrun,
        world: World,
        rank: int,
        local_rank: int,
        before: Start | None = None,
    ) -> None:
        super().__init__(torchrun.machine, torchrun)
        self.torchrun, self.rank, self.local_rank = torchrun, rank, local_rank
        self.process: Rank | None = None
        self.before = before
        self._world, self._is_known = world, False
        self.after(BOOT, self._fork)

    def _fork(self) -> None:
        if self.runs and not self.dies(Moment.STARTED, self):
            self.process = Rank(self, self._world)
            self.clock.after(self.job.random.uniform(*FORK), self.dies, Moment.FIRST, self)

    def knows(self) -> None:
        """The fork has said its pid to the launcher."""
        self._is_known = True
        self.clock.after(self.job.random.uniform(*READS), self.end, 0)

    def fork_ended(self, exit_code: int) -> None:
        """End as the fork has, unless it was known; the launcher reaps it."""
        if self.runs and not self._is_known:
            self.clock.after(self.job.random.uniform(*READS), self.end, exit_code or 1)

    def on_end(self) -> None:
        """Have torchrun notice; what it has not reaped is the launcher's."""
        launcher, process = self.machine.launcher, self.process
        if process and process.exit_code is not None and launcher and launcher.runs:
            launcher.system.child_ended(process.pid, process.exit_code)
        self.torchrun.starter_ended()
