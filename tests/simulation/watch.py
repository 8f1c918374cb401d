"""What is seen of a simulated job: the facts that promises.py judges, and a trace for people."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.peers import coordinator, events, member
from launcher.peers.messages import Failed, NoProgressReport, NoRanksHere, Start, Stop
from launcher.result.causes import Failure, Result, of_lost_host
from launcher.run import machine as run_machine
from launcher.run.events import Time
from launcher.run.state import KILL_AGAIN_SECONDS, MARGIN_SECONDS, Ending, Running, State, Why
from launcher.text.words import Log
from launcher.transitions import NoRow
from simulation import rows
from simulation.machine import Helper, Machine
from simulation.pipe import Pipe
from simulation.plan import Fault, What
from simulation.ranks import Rank
from simulation.strangers import IMPOSTORS

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.launcher import Launcher
    from simulation.torchrun import Torchrun


# Promises that are held while a job runs; the others are in promises.py.
QUIET = "With `--launcher-watch 0`, a sign of life each 15 s is all that is sent"
ALIVE_EVERY = 14.9
LEFT = "No process is left behind"
IN_ORDER = "No message of one attempt arrives in another"
KNOWN = "No script runs that the launcher does not know"
TOLD = "torchrun is told the pid of each of them, and how it ended, before its answer"
ONE = "Of one attempt a host lets the ranks of one torchrun go, and no others"
REAPED = "Nobody signals a process that was reaped"
IN_ROWS = "Each step that changes something or has actions is one of a row of the tables above"

_TOO_MANY = 3000  # steps of one launcher at one time


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
    """A failure that was reported to the coordinator, in which attempt, and how old it was."""

    time: float
    attempt: int
    failure: Failure
    age: float = 0.0


class StacksRequest:
    """Somebody's request to a host's launcher for all stacks, and when there was a reply."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.clock = machine, machine.job.clock
        self.time, self.replied_at = self.clock.now, math.inf
        Pipe(machine, self._receive).say({"want_stacks": True})

    def _receive(self, message: dict[str, Any]) -> None:
        assert message["lines"]
        self.replied_at = self.clock.now


class Watch:
    """The facts of one job.

    Attributes: `faults` that took effect, in the order of time; `failures` that were reported to
    the coordinator before it decided; `decided`, when and what; `restarts`, when; `quiet_from`,
    since when all ranks have trained and nothing has gone wrong, None at other times.
    """

    def __init__(self, job: Job, *, trace: bool) -> None:
        self.job = job
        self._steps: dict[str, tuple[float, int]] = {}  # of each host: how many at which time
        self.trace: list[str] | None = [] if trace else None
        self.events: dict[str, list[tuple[Any, str]]] = {name: [] for name in job.names}
        self.broken: list[Broken] = []
        self.faults: list[Happened] = []
        self.started: list[tuple[float, Machine, int]] = []  # torchruns, each with its attempt
        self.ranks: list[Rank] = []
        self.helpers: list[Helper] = []
        self.failures: list[ReportedFailure] = []
        self.decided: tuple[float, Result] | None = None
        self.restarts: list[float] = []
        self.lost_store: list[tuple[float, Rank]] = []  # ranks whose store has gone before them
        self.quiet_from: float | None = None
        self.alive: dict[str, float] = {}  # when launchers woke to say so, by host
        self.requests: list[StacksRequest] = []
        strangers = [fault for fault in job.plan.faults if fault.what is What.STRANGER]
        self.kinds = {fault.what for fault in job.plan.faults}
        self._has_impostors = any(fault.amount >= IMPOSTORS for fault in strangers)

    # What is decided.

    @contextlib.contextmanager
    def over_steps(self) -> Iterator[None]:
        """See every step of the state machines."""
        run, hosts, others = run_machine.step, coordinator.step, member.step

        def run_step(state: State, event: Any, now: float) -> Any:
            after, actions = run(state, event, now)
            self._stepped("run", state, event, after, actions)
            self._run(state, event, after, actions)
            return after, actions

        def hosts_step(state: coordinator.JobState, event: Any, now: float) -> Any:
            after, actions = hosts(state, event, now)
            message = event.message if isinstance(event, events.Received) else event
            self._stepped("coordinator", state, message, after, actions)
            self._coordinator(state, event, after, now)
            return after, actions

        def member_step(state: member.MemberState, event: Any, now: float) -> Any:
            after, actions = others(state, event, now)
            message = event.message if isinstance(event, events.Received) else event
            self._stepped("member", state, message, after, actions)
            return after, actions

        run_machine.step, coordinator.step, member.step = run_step, hosts_step, member_step
        try:
            yield
        finally:
            run_machine.step, coordinator.step, member.step = run, hosts, others

    def _stepped(self, which: str, before: Any, event: Any, after: Any, actions: Any) -> None:
        try:
            rows.check(which, before, event, after, actions)
        except (NoRow, AssertionError) as error:
            self.breaks(IN_ROWS, str(error))
        attempt = getattr(event, "attempt", None)
        # What a host says of ranks that do not move may come from one that waits for a restart.
        is_exact = which != "member" and not isinstance(event, NoProgressReport)
        if attempt is not None and is_exact and not self._has_impostors:
            expected = before.attempt + 1 if isinstance(event, Start) else before.attempt
            # What a host reports before it receives the start counts (coordinator.host_failed); and
            # others have ended, if the first one's launcher was stopped at a restart.
            of_host = isinstance(event, Failed) and not event.failure.may_restart
            has_ended = isinstance(event, NoRanksHere) and What.LAUNCHER_STOPS in self.kinds
            crosses = attempt == expected - 1 and (of_host or has_ended)
            if attempt != expected and not crosses:
                self.breaks(IN_ORDER, f"{type(event).__name__} {attempt} in {before.attempt}")

    def _run(self, before: State, event: Any, after: State, actions: Any) -> None:
        is_ = type(after.phase).__name__
        name = before.job.current_host
        at, count = self._steps.get(name, (0.0, 0))
        count = count + 1 if at == self.job.clock.now else 1
        self._steps[name] = self.job.clock.now, count
        if count > _TOO_MANY:
            raise RecursionError(f"{name} never stops")
        launcher = self.job.machines[self.job.names.index(name)].launcher
        assert launcher
        stops = isinstance(after.phase, Ending) and after.phase.why is Why.STOP
        if stops and launcher.stopping_since > self.job.clock.now:
            launcher.stopping_since = self.job.clock.now
        if self.trace is not None:
            self.events[name].append((event, is_))
            if not isinstance(event, Time) or actions or type(before.phase).__name__ != is_:
                self.note(f"{event!r}", name, is_)
            for action in actions:
                if not isinstance(action, Log):
                    self.note(f"    {action!r}", name, is_)

    def _coordinator(self, before: Any, event: Any, after: Any, now: float) -> None:
        ended, restarts = coordinator.JobEnded, coordinator.JobRestarting
        if isinstance(event, events.Lost) and not isinstance(before.phase, ended):
            failure = of_lost_host(event.host, f"was lost: {event.why}")
            self.failures.append(ReportedFailure(now, before.attempt, failure))
        if isinstance(event, events.Received) and isinstance(event.message, Failed):
            attempts = event.message.attempt, before.attempt
            crosses = attempts == (0, 1) and not event.message.failure.may_restart
            current = attempts[0] == attempts[1] or crosses
            if current and not isinstance(before.phase, (ended, restarts)):
                report = event.message
                self.failures.append(
                    ReportedFailure(now, before.attempt, report.failure, report.age)
                )
        if isinstance(after.phase, ended) and self.decided is None:
            self.decided = (now, after.phase.result)
        if isinstance(after.phase, restarts) and not isinstance(before.phase, restarts):
            self.restarts.append(now)
        if isinstance(event, events.Received) and isinstance(event.message, Stop):
            self.note("the coordinator hears of a stop", before.job.current_host)

    # What happens.

    def sends(self, machine: Machine) -> None:
        """A launcher sends something to another host."""
        self._acts(machine.name, "sends something")

    def polls(self, launcher: Launcher) -> None:
        """A launcher is woken by its timer."""
        self._acts(launcher.machine.name, "wakes up")

    def _acts(self, name: str, what: str) -> None:
        now, before = self.job.clock.now, self.alive.get(name, -math.inf)
        if self._is_quiet() and now != before:
            if now < before + ALIVE_EVERY:
                self.breaks(QUIET, f"{name} {what}")
            self.alive[name] = now

    def _is_quiet(self) -> bool:
        return self.quiet_from is not None and self.job.clock.now > self.quiet_from

    def never_stops(self) -> None:
        """A launcher's timer comes again and again."""
        self.breaks(QUIET, "a timer never stops")

    def loses_store(self, rank: Rank) -> None:
        """The torchrun has ended that keeps the store of a rank that runs."""
        self.lost_store.append((self.job.clock.now, rank))

    def note(self, what: str, host: str, phase: str = "") -> None:
        """Write a line of the trace: time, host, phase, what."""
        if self.trace is not None:
            self.trace.append(f"{self.job.clock.now:10.4f}  {host:10} {phase:10} {what}")

    def fault(self, fault: Fault, machine: Machine, rank: Rank | None = None) -> None:
        """A fault takes effect."""
        self.faults.append(Happened(self.job.clock.now, fault, machine, rank))
        self.quiet_from = None

    def asks_for_stacks(self, machine: Machine) -> None:
        """Somebody asks a launcher where all ranks are."""
        self.requests.append(StacksRequest(machine))
        self.quiet_from = None

    def trains(self) -> None:
        """All ranks run, of one attempt."""
        if any(one.rank is None for one in self.faults):
            return  # more than a rank has failed, which can be restarted
        if self.failures and self.failures[-1].attempt == max(at for *_, at in self.started):
            return  # the attempt is ending
        if self.job.plan.watch:
            return
        delays = sum(machine.delay for machine in self.job.machines)
        self.quiet_from = self.job.clock.now + 1 + 2 * delays

    def is_new(self, fault: Fault) -> bool:
        """Tell whether a fault has had no effect yet."""
        return all(one.fault is not fault for one in self.faults)

    # Ranks, as they start and end.

    def lets_go(self, rank: Rank) -> None:
        """A launcher lets a rank's script run."""
        launcher = rank.machine.launcher
        assert launcher
        phase = launcher.state.phase
        if not isinstance(phase, Running) or launcher.stopping_since <= self.job.clock.now:
            self.breaks(KNOWN, f"rank {rank.rank} is let go in {type(phase).__name__}")
        before = [one for one in self.ranks if one.let_go_at < math.inf]
        of_it = [one for one in before if one.machine is rank.machine]
        torchruns = {one.torchrun for one in of_it if one.attempt == rank.attempt}
        if torchruns - {rank.torchrun} and rank.machine.runner is None:
            self.breaks(ONE, f"rank {rank.rank} (pid {rank.pid}) is let go")

    def runs_script(self, rank: Rank) -> None:
        """A rank's script begins."""
        launcher = rank.machine.launcher
        known = launcher and launcher.runs and launcher.state.ranks.get(rank.pid)
        if math.isinf(rank.let_go_at) or not known:
            self.breaks(KNOWN, f"the script of rank {rank.rank} (pid {rank.pid}) runs")

    def answers(self, torchrun: Torchrun) -> None:
        """A torchrun hears that no rank of its runs any more."""
        for rank in torchrun.ranks:
            if rank.let_go_at < math.inf:
                told = torchrun.exit_codes.get(rank.rank)
                if rank.exit_code is None or told != rank.exit_code:
                    self.breaks(TOLD, f"rank {rank.rank} ended with {rank.exit_code}, not {told}")
                if torchrun.pids.get(rank.rank) != rank.pid:
                    self.breaks(TOLD, f"rank {rank.rank} has the pid {rank.pid}")

    def signals_reaped(self, machine: Machine, pid: int, number: int) -> None:
        """A launcher sends a signal to a pid that may be another process's by now."""
        self.breaks(REAPED, f"{machine.name} sends {number} to {pid}")

    def torchrun_starts(self, machine: Machine, attempt: int) -> None:
        """A launcher starts its torchrun."""
        self.started.append((self.job.clock.now, machine, attempt))

    def ended(self, launcher: Launcher) -> None:
        """A launcher has ended with a result."""
        # 5 s after the first of them was killed; what others leave behind is killed a poll later.
        by = self.job.clock.now - MARGIN_SECONDS + 2 * KILL_AGAIN_SECONDS + 0.01
        if {What.LAUNCHER_FAILS, What.LAUNCHER_STOPS} <= self.kinds:
            by = math.inf  # System.end_all has killed them, and waits for nothing
        left = [
            process
            for process in launcher.machine.processes.values()
            if not (process.is_held and process.killed_at < by)
        ]
        if left:
            self.breaks(LEFT, f"{launcher.machine.name} leaves {len(left)} processes behind")
        self.note(f"ENDS {launcher.result}", launcher.machine.name, "Done")

    def breaks(self, promise: str, how: str) -> None:
        """A promise is not kept."""
        self.broken.append(Broken(promise, f"{how}, at {self.job.clock.now:.3f} s"))
        self.note(f"BROKEN: {promise}: {how}", "")
