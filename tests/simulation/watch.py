"""What is seen of a simulated job: the facts that promises.py judges, and a trace for people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.events import Log, Time
from launcher.peers import first_state
from launcher.peers.events import HostFailed, HostLost, Send, SendAll
from launcher.result.causes import Cause, Failure, Result
from launcher.rules import Rules
from launcher.run.host import Host
from simulation.machine import Helper, Machine
from simulation.plan import Fault
from simulation.ranks import Rank

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.launcher import Launcher


# Promises that are held while a job runs; the others are in promises.py.
TABLE = "What is done in each case, phase by phase, is in [how-it-works.md]"
QUIET = "While a job runs, nothing is sent and nothing polls"
LEFT = "No process is left behind"

USED: set[tuple[Any, Any]] = set()  # rules of the tables that any job has used, in which phase


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


class Watch:
    """The facts of one job.

    Attributes: `faults` that took effect, in the order of time; `failures`, what the first host
    heard of each before it decided, and `decided`, when and what; `quiet_from`, since when all
    ranks have trained and nothing has gone wrong, None at other times; `ticks`, how often each
    launcher was woken by its timer.
    """

    def __init__(self, job: Job, *, trace: bool) -> None:
        self.job = job
        self.trace: list[str] | None = [] if trace else None
        self.events: dict[str, list[tuple[Any, str]]] = {name: [] for name in job.names}
        self.broken: list[Broken] = []
        self.faults: list[Happened] = []
        self.started: list[tuple[float, Machine]] = []  # torchruns
        self.ranks: list[Rank] = []
        self.helpers: list[Helper] = []
        self.failures: list[tuple[float, Failure]] = []
        self.decided: tuple[float, Result] | None = None
        self.quiet_from: float | None = None
        self.launcher: Launcher | None = None  # that takes something in

    # What the rules do

    @contextlib.contextmanager
    def over_rules(self) -> Iterator[None]:
        """See every step of both state machines, and hold it against their tables."""
        plain = Rules.step

        def step(rules: Any, state: Any, event: Any, now: float) -> Any:
            after, actions = plain(rules, state, event, now)
            rule = rules.rule(state.phase, type(event))
            if rule:
                USED.add((rule, state.phase))
            if after.phase is not state.phase and (rule is None or after.phase not in rule.to):
                phases = f"{state.phase.value} to {after.phase.value}"
                self.breaks(TABLE, f"{type(event).__name__} leads from {phases}")
            if rules is first_state.RULES and state.result is None:
                self._first_host_hears(event, after, now)
            return after, actions

        Rules.step = step  # type: ignore[method-assign]
        try:
            yield
        finally:
            Rules.step = plain  # type: ignore[method-assign]

    def _first_host_hears(self, event: Any, after: Any, now: float) -> None:
        if isinstance(event, HostFailed):
            self.failures.append((now, event.failure))
        elif isinstance(event, HostLost):
            how = f"{event.host} was lost: {event.why}\nexit code 69\n"
            self.failures.append((now, Failure(Cause.HOST_LOST, 69, how)))
        if after.result is not None:
            self.decided = (now, after.result)

    # What happens

    def stepped(self, launcher: Launcher, before: Host, event: Any, actions: Sequence[Any]) -> None:
        """A launcher has taken in an event."""
        now = self.job.clock.now
        if self.quiet_from is not None and now > self.quiet_from:
            sends = any(isinstance(action, (Send, SendAll)) for action in actions)
            if sends or isinstance(event, Time):
                self.breaks(QUIET, f"{launcher.machine.name} does: {event!r}")
        if launcher.host.run.stop_signal and not before.run.stop_signal:
            launcher.stopping_since = now
        if self.trace is not None:
            phase = launcher.host.run.phase.value
            self.events[launcher.machine.name].append((event, phase))
            self.note(f"{event!r}", launcher.machine.name, phase)
            for action in actions:
                line = f"log: {action.line}" if isinstance(action, Log) else repr(action)
                self.note(f"    {line}", launcher.machine.name, phase)

    def never_stops(self) -> None:
        """A launcher's timer comes again and again."""
        self.breaks(QUIET, "a timer never stops")

    def note(self, what: str, host: str, phase: str = "") -> None:
        """Write a line of the trace: time, host, phase, what."""
        if self.trace is not None:
            self.trace.append(f"{self.job.clock.now:10.4f}  {host:10} {phase:10} {what}")

    def fault(self, fault: Fault, machine: Machine, rank: Rank | None = None) -> None:
        """A fault takes effect."""
        self.faults.append(Happened(self.job.clock.now, fault, machine, rank))
        self.quiet_from = None

    def trains(self) -> None:
        """All ranks run, of one attempt."""
        if any(one.rank is None for one in self.faults):
            return  # more than a rank has failed, which torchrun can restart
        if any(failure.cause is not Cause.RESTARTED for _, failure in self.failures):
            return  # the job is ending
        delays = sum(machine.delay for machine in self.job.machines)
        self.quiet_from = self.job.clock.now + 1 + 2 * delays

    def torchrun_starts(self, machine: Machine) -> None:
        """A launcher starts its torchrun."""
        self.started.append((self.job.clock.now, machine))

    def ended(self, launcher: Launcher) -> None:
        """A launcher has ended with a result."""
        left = [process for process in launcher.machine.processes.values() if process.runs]
        if left:
            self.breaks(LEFT, f"{launcher.machine.name} leaves {len(left)} processes behind")
        self.note(f"ENDS {launcher.result}", launcher.machine.name, "done")

    def breaks(self, promise: str, how: str) -> None:
        """A promise is not kept."""
        self.broken.append(Broken(promise, f"{how}, at {self.job.clock.now:.3f} s"))
        self.note(f"BROKEN: {promise}: {how}", "")
