"""Simulated torchruns: each starts a host's stubs once, and ends with them.

And the program that runs torchrun where one does, as neuron_parallel_compile.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import NotFoundError
from simulation.faults import What
from simulation.keeper import Stub
from simulation.machine import Machine, Process

if TYPE_CHECKING:
    from simulation.system import System

# In seconds.
BOOT = (0.5, 1.0)  # until it has imported torch
JOINS = (0.05, 0.2)  # between two tries to join the first host's
MEETS = (0.01, 0.1)  # until it has heard that all are there
POPEN = (0.001, 0.01)  # until it has started one more stub
POLL = (0.001, 0.1)  # until it sees that a stub has ended
LOST = (0.4, 0.9)  # until it notices that the first host's is gone
THROUGH = (0.01, 0.2)  # until it sees that all hosts' are through
BARRIER = (300.0, 300.0)  # in which it waits for the others at the end
KILLS = (30.0, 30.0)  # its stubs, after it has begun to end
RUNNER_BOOT = (0.1, 0.5)  # until a program starts torchrun
FAILS_WITH = 3


class Program(Process):
    """What the launcher starts, as launcher/run/torchrun.py has it: `error` has its own words."""

    error = ""

    def words(self) -> str:
        """Return why it has ended, in its own words."""
        return self.error

    def drain(self) -> None:
        """There is nothing to copy."""


class Torchrun(Program):
    """One host's torchrun; all need the store in the first host's.

    Attributes: `hangs`, it does nothing any more; `is_through`, its stubs have ended with 0, and it
    waits for the other hosts'; `slowness` of its stubs, in seconds.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, machine.runner)
        self.is_tied = machine.runner is None
        machine.torchrun = self
        self.hangs = self.has_joined = self.is_ending = self.is_through = False
        self.stubs: list[Stub] = []
        slow = self.job.of(machine, What.STARTS_SLOWLY)
        self.slowness = slow.amount if slow else 0.0
        most = float(self.job.plan.start_timeout)
        self.soon((most, most), self._is_late)
        self.soon(BOOT, self._join)

    def soon(self, within: tuple[float, float], act: Callable[..., None], *arguments: Any) -> None:
        """Do something in a while, if it still does anything then."""
        super().soon(within, lambda: None if self.hangs else act(*arguments))

    def _of_all(self) -> list[Torchrun]:
        return [one.torchrun for one in self.job.machines if one.torchrun]

    def _is_late(self) -> None:
        if not self.stubs:
            self._fail("RendezvousTimeoutError: not all came")

    def _join(self) -> None:
        """Wait for all others; the last lets all start their stubs."""
        if self.job.of(self.machine, What.TORCHRUN_FAILS):
            self._fail("RuntimeError: the device is gone")
            return
        first = self.job.machines[0].torchrun
        self.has_joined = first is self or bool(
            first and first.has_joined and first.runs and first.machine.reaches(self.machine)
        )
        if not self.has_joined:
            self.soon(JOINS, self._join)
        elif sum(one.has_joined for one in self._of_all()) == self.job.plan.hosts:
            for one in self._of_all():
                one.soon(MEETS, one.start_stub)

    def start_stub(self) -> None:
        """Start the stubs, one after the other."""
        if not self.is_ending and len(self.stubs) < self.job.plan.nproc:
            self.stubs.append(Stub(self, len(self.stubs)))
            self.soon((POPEN[0] + self.slowness, POPEN[1] + self.slowness), self.start_stub)

    def child_ended(self, child: Process) -> None:
        """See what has become of the stubs."""
        self.soon(POLL, self._look)

    def _look(self) -> None:
        codes = [stub.exit_code for stub in self.stubs]
        if self.is_ending and None not in codes:
            self._fail(self.error)
        elif any(codes) and not self.is_ending:
            self._shut_down()
        elif codes == [0] * self.job.plan.nproc:
            self.is_through = True
            self.soon(BARRIER, self.end, 0)
            if all(one.is_through for one in self._of_all() if one.runs):
                for one in self._of_all():
                    one.soon(THROUGH, one.end, 0)

    def _shut_down(self, error: str = "") -> None:
        """End the stubs, which ignore it; kill them 30 s later."""
        self.error, self.is_ending = error, True
        for stub in self.stubs:
            stub.signal(signal.SIGTERM)
        self.soon(KILLS, self._kill)
        self.soon(POLL, self._look)

    def _kill(self) -> None:
        for stub in self.stubs:
            stub.signal(signal.SIGKILL)

    def loses_first(self) -> None:
        """The first host's is gone: it is told so, or waits for ever if no packets get there."""
        first = self.job.machines[0]
        if first.reaches(self.machine):
            self.soon(LOST, self._misses_first)
        else:
            self.hangs = True

    def _misses_first(self) -> None:
        if self.is_through:
            self.end(0)
        elif not self.is_ending:
            self._shut_down("RendezvousConnectionError: the connection to the store has failed")

    def on_signal(self, number: int) -> None:
        """End the stubs, or die where there are no handlers yet."""
        if not self.stubs:
            self.end(-number)
        elif not (self.hangs or self.is_ending):
            self._shut_down("SignalException: Process got signal: 15")

    def _fail(self, error: str) -> None:
        self.error = error
        self.end(1)

    def on_end(self) -> None:
        """Have all lose the store, if it is here."""
        self.is_out_of_reach()

    def is_out_of_reach(self) -> None:
        """It has ended, or its host is gone: so is the store that all use."""
        if self.machine.number == 0:
            for one in self._of_all():
                if one is not self and one.has_joined:
                    one.loses_first()
            self.job.loses_store(self)


class Runner(Program):
    """A program that runs torchrun, and works when that has succeeded."""

    is_tied = True

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, None)
        machine.runner = self
        self.soon(RUNNER_BOOT, Torchrun, machine)

    def child_ended(self, child: Process) -> None:
        """Go on if torchrun has succeeded; what it wrote of its end stays."""
        if isinstance(child, Torchrun):
            self.error = child.error
            works = self.job.plan.runner or 0.0
            self.soon(POLL if child.exit_code else (works, works), self._ends, child.exit_code)

    def _ends(self, code: int) -> None:
        fault = self.job.of(self.machine, What.RUNNER_FAILS)
        if fault and not code:
            self.job.watch.fault(fault, self.machine)
            code = FAILS_WITH
        self.end(code)


def start(system: System, *_: Any) -> Torchrun | Runner:
    """Start a host's torchrun, or what runs it, in place of launcher/run/torchrun.py's."""
    machine, job = system.machine, system.job
    assert machine.launcher
    if job.of(machine, What.NO_TORCHRUN):
        raise NotFoundError("cannot execute python: no such file.")
    kind = Torchrun if job.plan.runner is None else Runner
    machine.launcher.torchrun = process = kind(machine)
    return process
