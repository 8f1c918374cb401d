"""A simulated host's launcher: the real loop, on a simulated System."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING

from jobs import job_of

from launcher.job.plan import COMPILE
from launcher.result.causes import Result
from launcher.run.state import State
from launcher.run.supervisor import Supervisor
from simulation.faults import What
from simulation.machine import Machine, Process
from simulation.system import System
from simulation.torchrun import start

if TYPE_CHECKING:
    from simulation.job import Job

PORT = 29401
HANG_NOTIFY = 5.0  # seconds
TURN = 0.0002  # seconds that a turn of the loop takes, in which others go on
_TOO_MANY = 10_000  # turns of one launcher by itself: one that never stops
QUIET = "With `--launcher-watch 0`, a sign of life each 4 s is all that is sent"


class Launcher:
    """The launcher of one host.

    Attributes: `result`, how it ended, None while it runs or if it was killed; `stops`, the signals
    that it was sent, and when; `stopping_since`, when it began to stop its ranks.
    """

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine, self.clock = job, machine, job.clock
        self.runs = True
        self.result: Result | None = None
        self.started_at, self.ended_at = job.clock.now, math.inf
        self.stopping_since = math.inf
        self.torchrun: Process | None = None  # it, or the program that runs it
        self.stops: list[tuple[float, int]] = []
        self._wakes_at = math.inf
        self._is_woken = self._stands_still = self._fails = False
        self._turned = 0  # by its timer, or as something was ready still
        self.system = System(job, machine, self._wake)
        cannot, differs = job.of(machine, What.CANNOT_START), job.of(machine, What.DIFFERS)
        arguments = ["--seed", str(machine.number)] if differs else []
        seen = job_of(
            machine.name,
            job.names,
            fingerprint={} if cannot else {"script's arguments": arguments},
            runner="" if job.plan.runner is None else COMPILE,
            peer_port=PORT,
            hang_notify=HANG_NOTIFY,
            verbose=job.watch.trace is not None,
            **job.plan.options(),
        )
        self.supervisor = Supervisor(seen, {}, self.system, start_torchrun=start)  # type: ignore[arg-type]
        self._turns = self.supervisor.turns()

    @property
    def state(self) -> State:
        """What is known of its run."""
        return self.supervisor.state

    def begin(self) -> None:
        """Join the other hosts, or begin alone."""
        self._go_on(None)

    def signal(self, number: int) -> None:
        """Be sent a signal that stops a job."""
        self.stops.append((self.clock.now, number))
        self.system.signals.comes(number)

    # The loop.

    def _wake(self) -> None:
        if not self._is_woken and self.runs:
            self._is_woken = True
            self.clock.at(self.clock.now, self._turn)

    def _turn(self) -> None:
        if self.runs and not self._stands_still:
            self._is_woken = False
            self._go_on(self.system.selector.ready())

    def _go_on(self, ready: object) -> None:
        try:
            timeout = self._turns.send(ready)  # type: ignore[arg-type]
        except StopIteration:
            self._ends()
            return
        if timeout == 0 or self.system.selector.ready():
            self._is_woken = True
            self.clock.after(TURN, self._turn)
            self._turned_by_itself()
            return
        wakes_at = math.inf if timeout is None else self.clock.now + timeout
        if wakes_at != self._wakes_at:
            self._wakes_at = wakes_at
            if timeout is not None:
                self.clock.at(wakes_at + 1e-6, self._times_out, wakes_at)

    def _times_out(self, at: float) -> None:
        if at != self._wakes_at:
            return  # it was to wake earlier
        self._wakes_at = math.inf
        if self.runs and not self._is_woken:
            self._turned_by_itself()
            if not self._stands_still:
                self.job.watch.acts(self.machine, "wakes up")
            self._wake()

    def _turned_by_itself(self) -> None:
        self._turned += 1
        if self._turned > _TOO_MANY:
            self.job.watch.breaks(QUIET, f"{self.machine.name} never stops")
            self.die()

    # What the plan does to it.

    def stand_still(self, seconds: float) -> None:
        """Do nothing for a while, as on a machine that has no time for it."""
        if self.runs and not self._stands_still:
            self._stands_still = True
            self.clock.after(seconds, self._moves)

    def fail(self) -> None:
        """Meet an error that nobody expects."""
        if not self._fails:
            self._fails = True
            self.system.in_loop(0.0, self._raise)

    def _raise(self) -> None:
        raise RuntimeError("a mistake")

    def _moves(self) -> None:
        self._stands_still = self._is_woken = False
        self._wake()

    def die(self, *, told: bool = True) -> None:
        """Be killed; the kernel tells the other ends, if it is still there itself."""
        if not self.runs:
            return
        self.runs = False
        self.ended_at = self.clock.now
        if told:
            self.job.network.disconnect(self.machine)
            self.system.disconnect()
            for process in list(self.machine.processes.values()):
                if process.is_tied and process.parent is None:
                    process.signal(signal.SIGTERM)

    def _ends(self) -> None:
        self.runs = False
        self.result = self.state.result
        self.ended_at = self.clock.now
        self.job.network.disconnect(self.machine)
        self.job.watch.ended(self)
