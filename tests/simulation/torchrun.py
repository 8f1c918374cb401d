"""Simulated torchruns: each starts a host's stubs once, and waits for their ends.

And the program that runs torchrun where one does, as neuron_parallel_compile.
"""

from __future__ import annotations

import enum
import signal
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import NotFoundError
from simulation.keeper import Stub
from simulation.machine import Machine, Process
from simulation.plan import What

if TYPE_CHECKING:
    from simulation.store import Meeting
    from simulation.system import System

# In seconds.
BOOT = (0.5, 1.0)  # until it has imported torch
POPEN = (0.001, 0.01)  # until it has started one more stub
POLL = (0.001, 0.1)  # until it sees that a stub has ended
KILLS = 30.0  # after it has begun to end, its stubs
BARRIER = 300.0  # in which it waits for the others at the end
RUNNER_BOOT = (0.1, 0.5)  # until a program starts torchrun
FAILS_WITH = 3


class Doing(enum.Enum):
    """What a torchrun is at."""

    BOOTING = "booting"
    MEETING = "meeting"  # it waits for the other hosts' torchruns
    RUNNING = "running"
    ENDING = "ending"  # its stubs
    BARRIER = "barrier"  # all its stubs have ended with 0; it waits for the other hosts'


class Program(Process):
    """What the launcher starts, as launcher/run/torchrun.py has it: `error` has its own words."""

    due = float("inf")
    error = ""

    def words(self) -> str:
        """Return why it has ended, in its own words."""
        return self.error

    def tick(self) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """There is nothing to close."""


class Torchrun(Program):
    """One host's torchrun.

    Attributes: `hangs`, it does nothing any more; `is_stuck`, it waits for
    a store that does not answer, and is as deaf; `group_rank`, `slowness` of its stubs.
    """

    def __init__(self, machine: Machine, meeting: Meeting) -> None:
        super().__init__(machine, machine.runner)
        self.is_tied = machine.runner is None
        machine.torchrun = self
        self.meeting = meeting
        self.doing = Doing.BOOTING
        self.hangs = self.is_stuck = False
        self.group_rank = 0
        self.stubs: list[Stub] = []
        slow = self.job.of(machine, What.STARTS_SLOWLY)
        self.slowness = slow.amount if slow else 0.0
        self._still(BOOT, self._boot)

    def _still(self, within: tuple[float, float], act: Callable[[], None]) -> None:
        """Do something in a while, if it still does what it does then."""
        doing = self.doing

        def do() -> None:
            if self.doing is doing and not self.hangs and not self.is_stuck:
                act()

        self.soon(within, do)

    def _boot(self) -> None:
        if self.job.of(self.machine, What.TORCHRUN_FAILS):
            self._fail("RuntimeError: the device is gone")
            return
        if self.machine.number == 0:
            self.meeting.host = self
        self.doing = Doing.MEETING
        most = float(self.job.plan.start_timeout)
        self._still((most, most), lambda: self._fail("RendezvousTimeoutError: not all came"))
        self._join()

    def _join(self) -> None:
        if self.meeting.is_reached_by(self):
            self.meeting.join(self)
        elif self.meeting.host is None:
            self._still((0.05, 0.2), self._join)
        else:
            self.meeting.breaks_for(self)

    def meets(self, number: int) -> None:
        """All hosts' torchruns are here: start the stubs."""
        if self.doing is Doing.MEETING and not self.hangs and not self.is_stuck:
            self.doing, self.group_rank = Doing.RUNNING, number
            self._start_stubs()

    def _start_stubs(self) -> None:
        plan, local_rank = self.job.plan, len(self.stubs)
        if local_rank < plan.nproc:
            self.stubs.append(Stub(self, self.group_rank * plan.nproc + local_rank, local_rank))
            self._still((POPEN[0] + self.slowness, POPEN[1] + self.slowness), self._start_stubs)

    def child_ended(self, child: Process) -> None:
        """See what has become of the stubs."""
        if self.doing is Doing.RUNNING:
            self._still(POLL, self._look)
        elif self.doing is Doing.ENDING:
            self._if_alone()

    def _look(self) -> None:
        codes = [stub.exit_code for stub in self.stubs]
        if any(codes):
            self._shut_down()
        elif len(codes) == self.job.plan.nproc and None not in codes:
            self.doing = Doing.BARRIER
            self._still((BARRIER, BARRIER), lambda: self.end(0))
            if self.meeting.is_reached_by(self):
                self.meeting.passes(self)
            else:
                self.meeting.breaks_for(self)

    def _shut_down(self) -> None:
        """End the stubs, which ignore it; kill them 30 s later."""
        self.doing = Doing.ENDING
        for stub in self.stubs:
            stub.signal(signal.SIGTERM)
        self._still((KILLS, KILLS), self._kill)
        self._if_alone()

    def _kill(self) -> None:
        for stub in self.stubs:
            stub.signal(signal.SIGKILL)

    def _if_alone(self) -> None:
        if not any(stub.runs for stub in self.stubs):
            self._still((0.01, 0.1), lambda: self._fail(self.error))

    def loses_store(self) -> None:
        """Its store is gone, which it notices where it needs it."""
        if self.hangs:
            return
        self.error = "RendezvousConnectionError: the connection to the C10d store has failed"
        if self.doing is Doing.RUNNING:
            self._shut_down()
        elif self.doing is Doing.MEETING:
            self.end(1)
        elif self.doing is Doing.BARRIER:
            self.end(0)

    def leaves_barrier(self) -> None:
        """All hosts are through."""
        if self.doing is Doing.BARRIER and not self.hangs:
            self.end(0)

    def on_signal(self, number: int) -> None:
        """End the stubs, or die where there are no handlers yet."""
        if self.doing in (Doing.BOOTING, Doing.MEETING):
            self.end(-number)
        elif self.doing is Doing.RUNNING and not self.hangs and not self.is_stuck:
            self.error = "SignalException: Process got signal: 15"
            self._shut_down()

    def _fail(self, error: str) -> None:
        self.error = error
        self.end(1)

    def on_end(self) -> None:
        """Lose the store for all, if it is here."""
        self.meeting.ends(self)


class Work(Process):
    """What a program has started when torchrun has succeeded: a compiler."""

    def __init__(self, runner: Runner, seconds: float) -> None:
        super().__init__(runner.machine, runner)
        self.clock.after(seconds, self.end, 0)


class Runner(Program):
    """A program that runs torchrun, and works when that has succeeded."""

    is_tied = True

    def __init__(self, machine: Machine, meeting: Meeting) -> None:
        super().__init__(machine, None)
        machine.runner = self
        self._work: Work | None = None
        self.soon(RUNNER_BOOT, Torchrun, machine, meeting)

    def child_ended(self, child: Process) -> None:
        """Go on if torchrun has ended, and what it works at."""
        if isinstance(child, Torchrun):
            if child.exit_code:
                self.soon(POLL, self.end, 1)
            else:
                self._work = Work(self, self.job.plan.runner or 0.0)
        elif child is self._work:
            fault = self.job.of(self.machine, What.RUNNER_FAILS)
            if fault:
                self.job.watch.fault(fault, self.machine)
            self.soon(POLL, self.end, FAILS_WITH if fault else 0)


def start(system: System, *_: Any) -> Torchrun | Runner:
    """Start a host's torchrun, or what runs it, in place of launcher/run/torchrun.py's."""
    machine, job = system.machine, system.job
    assert machine.launcher
    if job.of(machine, What.NO_TORCHRUN):
        raise NotFoundError("cannot execute python: no such file.")
    kind = Torchrun if job.plan.runner is None else Runner
    machine.launcher.torchrun = process = kind(machine, job.meeting)
    return process
