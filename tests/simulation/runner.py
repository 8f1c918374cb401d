"""A simulated program that runs torchrun, as neuron_parallel_compile does.

It passes no signal on. It waits for torchrun, and for the end of all output: of all that ranks have
started. Then it works for a while, in a process of its own, unless torchrun has failed.
"""

from __future__ import annotations

import signal
from typing import Callable

from launcher.errors import EXIT_HOST_LOST
from launcher.job.neuron import COMPILE
from launcher.run.events import TorchrunEnded, TorchrunGone
from launcher.run.reports import WITHOUT_A_CODE, of_both
from simulation.machine import Machine, Process
from simulation.plan import What
from simulation.talking import TAKES

BOOT = (0.1, 0.5)  # seconds, until it starts torchrun
FAILS_WITH = 3


class Work(Process):
    """What it has started when torchrun has succeeded: a compiler."""

    def __init__(self, runner: Runner, seconds: float) -> None:
        super().__init__(runner.machine, runner, leads=False)
        self.clock.after(seconds, self.end, 0)


class Runner(Process):
    """The program.

    Attributes: `start`, starts torchrun; `torchrun`, as the launcher knows it: None before it runs,
    and once the launcher has heard of its end; `said`, how that ended; `work`.
    """

    def __init__(self, machine: Machine, start: Callable[[], Process]) -> None:
        super().__init__(machine, None)
        machine.runner = self
        self.torchrun: Process | None = None
        self.said: TorchrunEnded | None = None
        self.work: Work | None = None
        self.clock.after(self.job.random.uniform(*BOOT), self._boot, start)

    def _boot(self, start: Callable[[], Process]) -> None:
        if self.runs:
            self.torchrun = start()

    def told(self, number: int) -> None:
        """Be sent a signal by the launcher, as launcher/processes.py does it: torchrun alone is."""
        if self.torchrun and number != signal.SIGKILL:
            self.torchrun.signal(number)
        elif self.runs:
            for process in list(self.machine.processes.values()):
                if process.session == self.pid:
                    process.signal(number)

    def outlives(self, ended: TorchrunEnded) -> TorchrunGone:
        """Return what the launcher hears of torchrun's end."""
        if ended.returncode < 0 and self.job.random.random() < 0.1:  # it has been reaped before
            ended = ended._replace(returncode=EXIT_HOST_LOST, error=WITHOUT_A_CODE)
        self.clock.after(TAKES[1] + 0.001, self._is_known, ended)
        return TorchrunGone(ended.returncode, ended.error)

    def _is_known(self, ended: TorchrunEnded) -> None:
        self.torchrun, self.said = None, ended

    def sees_end(self) -> None:
        """Go on if torchrun has ended, and nothing else is left."""
        others = [process for process in self.machine.processes.values() if process is not self]
        torchrun = self.machine.torchrun
        if others or not self.runs or torchrun is None or torchrun.runs:
            return
        if torchrun.exit_code:
            self.clock.after(0.01, self.end, 1)
        elif self.work is None:
            seconds = self.job.plan.runner
            assert seconds is not None
            self.work = Work(self, seconds)
        else:
            self._has_worked()

    def _has_worked(self) -> None:
        fault = self.job.of(self.machine, What.RUNNER_FAILS)
        if fault:
            self.job.watch.fault(fault, self.machine)
        self.end(FAILS_WITH if fault else 0)

    def on_end(self) -> None:
        """Have the kernel tell torchrun, and the launcher see it once it has heard all before."""
        torchrun = self.machine.torchrun
        if torchrun and self.machine.is_up:
            # PR_SET_PDEATHSIG: no SIGKILL to both of them leaves it the time to act on it.
            self.clock.after(0.0001, torchrun.signal, signal.SIGTERM)
        self.clock.after(TAKES[1] + 0.001, self._has_ended)

    def _has_ended(self) -> None:
        launcher = self.machine.launcher
        assert launcher and self.exit_code is not None
        said = self.said or TorchrunEnded(0)
        gone = TorchrunGone(said.returncode, said.error) if self.said else None
        launcher.hear(of_both(said._replace(returncode=self.exit_code), gone, COMPILE))
