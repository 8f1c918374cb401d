"""What is seen of a simulated job: the facts that promises.py judges, and a trace for people."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.peers import coordinator, events
from launcher.peers.coordinator import Clearing, Ended, JobState
from launcher.peers.messages import Start
from launcher.result.causes import Failure, Result, of_lost_host
from launcher.run import machine as run_machine
from launcher.run.state import Ending, Running, State, Why
from simulation.faults import Fault
from simulation.keeper import AGAIN, STUCK
from simulation.launcher import QUIET, Launcher
from simulation.machine import Machine
from simulation.ranks import Rank, Upload
from simulation.system import Pipe

if TYPE_CHECKING:
    from simulation.job import Job


# Promises that are held while a job runs; the others are in promises.py.
ALIVE_EVERY = 3.9
LEFT = "No process is left behind"
ONE = "Of one attempt each rank's script is started once"
VALID = "No message is ignored"


class Broken(NamedTuple):
    """A promise that a job has not kept."""

    promise: str  # the sentence of the documents
    how: str


class Happened(NamedTuple):
    """A fault that took effect: those that come too late do not."""

    time: float
    fault: Fault
    machine: Machine
    rank: Rank | None


class ReportedFailure(NamedTuple):
    """A failure that was reported to the coordinator, and in which attempt."""

    time: float
    attempt: int
    failure: Failure


class StacksRequest:
    """Somebody's request to a host's launcher for all stacks, and when there was a reply."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.clock = machine, machine.job.clock
        self.time, self.replied_at = self.clock.now, math.inf
        Pipe(machine, self._receive).say({"want_stacks": True})

    def _receive(self, message: dict[str, Any]) -> None:
        assert message["lines"]
        self.replied_at = self.clock.now


def seen(step: Callable[..., Any], see: Callable[..., None]) -> Callable[..., Any]:
    """Return a machine's step with somebody who sees it."""

    def stepped(state: Any, event: Any, now: float) -> Any:
        after, actions = step(state, event, now)
        see(state, event, after, now)
        return after, actions

    return stepped


class Watch:
    """The facts of one job.

    Attributes: `faults` that took effect, in the order of time; `failures` that were reported to
    the coordinator before its reason was settled; `decided`, when all were to end and how the job
    ends, settled at `settled_at`; `restarts`, when; `quiet_from`,
    since when all ranks have trained and nothing has gone wrong, None at other times.
    """

    def __init__(self, job: Job, *, trace: bool) -> None:
        self.job = job
        self.trace: list[str] | None = [] if trace else None
        self.broken: list[Broken] = []
        self.faults: list[Happened] = []
        self.started: list[tuple[float, Machine, int]] = []  # torchruns, each with its attempt
        self.ranks: list[Rank] = []
        self.uploads: list[Upload] = []
        self.failures: list[ReportedFailure] = []
        self.decided: tuple[float, Result] | None = None
        self.settled_at = math.inf
        self.restarts: list[float] = []
        self.lost_store: list[tuple[float, Rank]] = []  # ranks whose store has gone before them
        self.quiet_from: float | None = None
        self.alive: dict[str, float] = {}  # when launchers woke to say so, by host
        self.requests: list[StacksRequest] = []

    @property
    def attempt(self) -> int:
        """The last attempt that was started."""
        return max((attempt for *_, attempt in self.started), default=0)

    # What is decided.

    @contextlib.contextmanager
    def over_steps(self) -> Iterator[None]:
        """See every step of the state machines."""
        run, hosts = run_machine.step, coordinator.step
        run_machine.step, coordinator.step = seen(run, self._run), seen(hosts, self._coordinator)
        try:
            yield
        finally:
            run_machine.step, coordinator.step = run, hosts

    def _run(self, before: State, event: Any, after: State, now: float) -> None:
        now, name = self.job.clock.now, after.job.current_host
        launcher = self.job.machines[self.job.names.index(name)].launcher
        assert launcher
        if isinstance(event, Start) and isinstance(after.phase, Running):
            self.started.append((now, launcher.machine, event.attempt))
        if isinstance(after.phase, Ending) and after.phase.why is Why.STOP:
            launcher.stopping_since = min(launcher.stopping_since, now)

    def _coordinator(self, before: JobState, event: Any, after: JobState, now: float) -> None:
        message = event.message if isinstance(event, events.Received) else event
        phase = after.phase
        is_open = not isinstance(before.phase, (Clearing, Ended))
        if isinstance(before.phase, Clearing):
            is_open = bool(before.phase.end.restart)
        if isinstance(event, events.Lost) and is_open:
            failure = of_lost_host(event.host, f"was lost: {event.why}")
            self.failures.append(ReportedFailure(now, before.attempt, failure))
        if isinstance(message, Failure):
            of_host = not message.may_restart
            # Once all hosts end ranks for a failure only another one of a rank may replace it.
            counts = is_open or (getattr(before.phase, "failures", ()) and not of_host)
            if counts:
                failed = ReportedFailure(now, before.attempt, message)
                self.failures.append(failed)
        if after.result and after.result != before.result:
            self.decided = (self.decided[0] if self.decided else now), after.result
            self.settled_at = now
        elif isinstance(phase, Clearing) and not isinstance(before.phase, Clearing):
            self.restarts.append(now)

    # What happens.

    def acts(self, machine: Machine, what: str) -> None:
        """A launcher sends something to another host, or is woken by its timer."""
        now, before = self.job.clock.now, self.alive.get(machine.name, -math.inf)
        if self.quiet_from is not None and now > self.quiet_from and now != before:
            if now < before + ALIVE_EVERY:
                self.breaks(QUIET, f"{machine.name} {what}")
            self.alive[machine.name] = now

    def logs(self, machine: Machine, line: str) -> None:
        """A launcher writes a line of its log."""
        self.note(f"log: {line}", machine.name)
        if "an invalid message" in line:
            self.breaks(VALID, f"{machine.name}: {line}")

    def loses_store(self, rank: Rank) -> None:
        """What keeps the store of a rank that runs has ended."""
        self.lost_store.append((self.job.clock.now, rank))

    def note(self, what: str, host: str) -> None:
        """Write a line of the trace: time, host, what."""
        if self.trace is not None:
            self.trace.append(f"{self.job.clock.now:10.4f}  {host:10} {what}")

    def fault(self, fault: Fault, machine: Machine, rank: Rank | None = None) -> None:
        """A fault takes effect."""
        self.faults.append(Happened(self.job.clock.now, fault, machine, rank))
        self.quiet_from = None

    def asks_for_stacks(self, machine: Machine) -> None:
        """Somebody asks a launcher where all ranks are."""
        self.requests.append(StacksRequest(machine))
        self.quiet_from = None

    def trains(self) -> None:
        """All ranks run, of one attempt; unless more has failed than a rank it gets quiet."""
        is_ending = self.failures and self.failures[-1].attempt == self.attempt
        broken = any(one.rank is None for one in self.faults)
        if not (broken or self.requests or is_ending or self.job.plan.watch):
            delays = sum(machine.delay for machine in self.job.machines)
            self.quiet_from = self.job.clock.now + 1 + 2 * delays

    # Ranks, as they start and end.

    def starts_script(self, rank: Rank) -> None:
        """A keeper starts a rank's script."""
        if any(one.rank == rank.rank and one.attempt == rank.attempt for one in self.ranks):
            self.breaks(ONE, f"rank {rank.rank} is started again in attempt {rank.attempt}")
        if (rank.attempt > 1) != bool(rank.port):
            self.breaks(ONE, f"rank {rank.rank} of attempt {rank.attempt} uses port {rank.port}")
        self.ranks.append(rank)

    def ended(self, launcher: Launcher) -> None:
        """A launcher has ended with a result."""
        by = self.job.clock.now - STUCK + 2 * AGAIN + 0.01
        processes = launcher.machine.processes.values()
        left = [one.pid for one in processes if not (one.is_held and one.killed_at < by)]
        if left:
            self.breaks(LEFT, f"{launcher.machine.name} leaves {left} behind")
        self.note(f"ENDS {launcher.result}", launcher.machine.name)

    def breaks(self, promise: str, how: str) -> None:
        """A promise is not kept."""
        self.broken.append(Broken(promise, f"{how}, at {self.job.clock.now:.3f} s"))
        self.note(f"BROKEN: {promise}: {how}", "")
