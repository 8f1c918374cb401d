"""A simulated program that runs torchrun, as neuron_parallel_compile does.

It works for a while, then starts torchrun, and passes no signal on. It waits for torchrun, and for
the end of all output: of all that ranks have started. Then it works again, unless torchrun has
failed. It may run torchrun several times.
"""

from __future__ import annotations

from typing import Callable

from simulation.machine import Machine, Process
from simulation.plan import What

BOOT = (0.1, 0.5)  # seconds, until it starts torchrun
FAILS_WITH = 3


class Work(Process):
    """What it has started when torchrun has succeeded: a compiler."""

    def __init__(self, runner: Runner, seconds: float) -> None:
        super().__init__(runner.machine, runner, leads=False)
        self.clock.after(seconds, self.end, 0)


class Runner(Process):
    """The program. Attributes: `torchrun`, None before it runs; `work`."""

    def __init__(self, machine: Machine, start: Callable[[int], Process]) -> None:
        super().__init__(machine, None)
        machine.runner = self
        self.is_tied = True
        self.torchrun: Process | None = None
        self.work: Work | None = None
        self._start, self._ran = start, 0
        self._boots()

    def _boots(self) -> None:
        self.clock.after(self.job.random.uniform(*BOOT), self._boot)

    def _boot(self) -> None:
        if self.runs:
            self._ran += 1
            self.torchrun = self._start(self._ran)

    def on_signal(self, number: int) -> None:
        """End, or go on."""
        if not self.job.of(self.machine, What.RUNNER_IGNORES):
            self.end(-number)

    def sees_end(self) -> None:
        """Go on if torchrun has ended, and nothing else is left."""
        others = [process for process in self.machine.processes.values() if process is not self]
        if others or not self.runs or self.torchrun is None or self.torchrun.runs:
            return
        if self.torchrun.exit_code:
            self.clock.after(0.01, self.end, 1)
        elif self._ran < self.job.plan.runs:
            self.torchrun = None
            self._boots()
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
