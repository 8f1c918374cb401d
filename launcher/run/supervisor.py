"""The loop of one host: turns what happens into events, and carries out what is decided.

torchrun runs in a session of its own with the launcher's stdin, stdout and stderr. One loop waits
for its end, for signals, for what the ranks report and for the other hosts. While a job runs it
looks how far the ranks are every 15 s, and polls nothing else. Everything outside it is reached
through System.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import signal
from collections.abc import Generator, Mapping
from typing import Any, Callable

from launcher.errors import EXIT_SOFTWARE, STOPS, WARNINGS, Disposition, LaunchError
from launcher.host.child import Question
from launcher.host.run_dir import IN_RANK, unpacked
from launcher.host.signals import left_alone
from launcher.host.system import System
from launcher.job import gpu_health
from launcher.job.options import EXIT_BARRIER, JOB_MARK, RUN_DIR, WATCHER
from launcher.job.plan import LaunchPlan, for_attempt
from launcher.job.prepare import reached_at
from launcher.peers.channel import Channel
from launcher.peers.messages import (
    AllStacks,
    CollectStacks,
    HostStacks,
    Job,
    ProgressReport,
    StacksRequest,
)
from launcher.result.causes import Failure, of_host, of_launcher
from launcher.run import events, machine
from launcher.run.ranks import passed_on
from launcher.run.reports import Reports
from launcher.run.state import Done, Joining, State
from launcher.text.decisions import described
from launcher.text.log import traceback_of
from launcher.text.words import Log, printable
from launcher.watch import stacks
from launcher.watch.host import Watch

# No host leaves one that still trains, however long it does. In seconds; torch counts 2**31 ms at
# most.
_NEVER = str(20 * 86400)
_MOST_TRACEBACKS = 3  # of errors of the launcher itself
_TO_END = 20.0  # s more than the failure grace for a job to end in order, after such an error
Ready = list[tuple[selectors.SelectorKey, int]]


def run(
    job: Job, plan: LaunchPlan | Exception, environ: Mapping[str, str], system: System
) -> State:
    """Run this host's share of the job to its end; return the state at the end, with its result.

    `plan` is what to start, or why it cannot be started, which the other hosts are told.
    """
    supervisor = Supervisor(job, plan, environ, system)
    turns = supervisor.turns()
    with contextlib.suppress(StopIteration):
        timeout = next(turns)
        while True:
            timeout = turns.send(ready(system.selector, timeout))
    return supervisor.state


def ready(selector: selectors.BaseSelector, timeout: float | None) -> Ready:
    """Wait for what happens, at most so many seconds; return it.

    If this process was stopped meanwhile, select() says only that the time is over, and not what
    has happened, which comes before what is due.
    """
    return selector.select(timeout) or selector.select(0)


class Supervisor:
    """The effects: what is open and running. What is known and decided is in `state`."""

    def __init__(
        self,
        job: Job,
        plan: LaunchPlan | Exception,
        environ: Mapping[str, str],
        system: System,
    ) -> None:
        runner = plan.runner if isinstance(plan, LaunchPlan) else ""
        self._plan, self._environ, self._system = plan, environ, system
        self._runner = runner
        self._stack = contextlib.ExitStack()
        self._folder = self._mark = ""
        self._reports: Reports | None = None
        self._shows: dict[int, int] = {}  # numbers of CollectStacks, by what ranks were asked
        self._where = 0  # by what number they were asked before they are killed
        self._said = {""}  # of what the watch cannot see
        self._child = self._errors = 0
        self._question: Question | None = None  # to the driver of the GPUs
        self._error: Exception | None = None  # the launcher's own, the first
        self._give_up_at = math.inf  # where they go on, or an end is still waited for
        self._watch = _watch(job)
        if isinstance(plan, LaunchPlan):
            try:
                self._begin_attempt(job)
            except Exception as error:  # before any host starts anything
                self._plan, job = error, job._replace(fingerprint={})
        self.state = machine.begin(job, runner, system.now())
        self._channel = Channel(job, system, self._hear)

    def turns(self) -> Generator[float | None, Ready, None]:
        """Wait and act until this host has nothing left to do.

        Yields how long to wait at most, None for ever; is sent what the selector found ready.
        """
        try:
            self._safely(self._begin)
            while not isinstance(self.state.phase, Done):
                ready = yield self._timeout()
                # Signals last: what happened before a stop has come before it.
                for key, _ in sorted(ready, key=lambda one: one[0].data == self._on_signals):
                    # What came before it may have closed it: by a restart, all of the attempt's.
                    if self._system.selector.get_map().get(key.fd) is key:
                        self._safely(key.data)
                self._safely(functools.partial(self._do_what_is_due, is_quiet=not ready))
                if self._error and self._system.now() >= self._ends_by():
                    raise self._error
        except Exception as error:
            self._end_at_once(error)
        finally:
            self._channel.close()
            self._stop_asking_gpus()
            self._end_attempt()

    def _do_what_is_due(self, *, is_quiet: bool) -> None:
        if self._reports:
            self._reports.look(is_quiet=is_quiet)
            if self._reports and self._reports.has_more:
                return  # what has happened comes before what is due
        now = self._system.now()
        if now >= machine.due(self.state):
            self._step(events.Time())
        if now >= self._channel.due():
            self._channel.tick()
        if now >= self._watch.due():
            self._watch_ranks(now)

    # Errors of the launcher itself.

    def _safely(self, act: Callable[[], None]) -> None:
        """Do something; have an error that it raises end the job, in order and on all hosts."""
        try:
            act()
        except Exception as error:
            if isinstance(error, LaunchError) and isinstance(self.state.phase, Joining):
                self._cannot_start(error)  # a person can fix it
                return
            now = self._system.now()
            if now >= self._give_up_at:
                raise
            self._errors += 1
            if self._errors <= _MOST_TRACEBACKS:
                self._log_traceback(error)
            if self._errors == 1:
                self._error = error
                self._give_up_at = now + self.state.job.failure_grace + _TO_END
                self._step(events.LauncherFailed(self._own_failure(error)))

    def _ends_by(self) -> float:
        """Return until when an end in order is waited for; ranks may have had a stop before."""
        job = self.state.job
        more = max(0.0, job.grace - job.failure_grace) if self.state.alive else 0.0
        return self._give_up_at + more

    def _log_traceback(self, error: Exception) -> None:
        with contextlib.suppress(Exception):  # the log's own
            for line in traceback_of(error):
                self._system.log(line)

    def _own_failure(self, error: Exception) -> Failure:
        return of_launcher(self.state.job.current_host, error)

    def _end_at_once(self, error: Exception) -> None:
        """End what runs here, with its failure grace, past state machines that do not."""
        self._log_traceback(error)
        failure = self._own_failure(error)
        with contextlib.suppress(Exception):
            self._channel.say_last(failure)
        # What raised may have been what would have noted them.
        known = self._reports.pids if self._reports else ()
        pids = list({*known, *(rank.pid for rank in self.state.alive)})
        try:
            self._system.end_all(pids, self.state.job.failure_grace)
        except Exception:  # /proc cannot be read
            child = () if self.state.torchrun.child_has_ended else (self._child,)
            for leader in filter(None, (*pids, *child)):
                self._system.send_group(leader, signal.SIGKILL)
        result = self.state.result or failure.result
        self.state = self.state._replace(phase=Done(), result=result)

    def _begin(self) -> None:
        self._system.selector.register(self._system.signals, selectors.EVENT_READ, self._on_signals)
        self._on_signals()  # a stop that came before anything was started
        if not isinstance(self.state.phase, Done):
            self._channel.begin()
        if isinstance(self._plan, Exception):
            self._cannot_start(self._plan)

    def _timeout(self) -> float | None:
        due = min(machine.due(self.state), self._channel.due(), self._watch.due(), self._ends_by())
        seconds = max(0.0, due - self._system.now())
        look = self._reports.timeout() if self._reports else None
        seconds = seconds if look is None else min(seconds, look)
        return None if math.isinf(seconds) else seconds

    def _hear(self, event: Any) -> None:
        """Take in what the coordinator, a rank or somebody else at this host says."""
        if isinstance(event, StacksRequest):
            self._channel.say(event)
        elif isinstance(event, CollectStacks):
            self._shows[self._ask(may_signal=event.may_signal)] = event.number
            self._tell_where(self._system.now())
        elif isinstance(event, AllStacks):
            job, lines = self.state.job, list(event.lines)
            # The same on all hosts whose launchers talk, and another job's is not.
            key = job.endpoint if job.peer_port else self._mark
            message = {"job": job.name, "key": key, "lines": lines}
            if self._reports:
                self._reports.show_stacks(message)
        else:
            if isinstance(event, events.RanksStarted):
                self._channel.world = event.world
            self._step(event)

    def _step(self, event: Any) -> None:
        before, now = self.state, self._system.now()
        self.state, actions = machine.step(before, event, now)
        if before.job.verbose:
            began = before.times.began
            line = described("run", before, event, self.state, actions, now - began)
            if line:
                self._system.log(line)
        for action in actions:
            self._do(action)

    def _on_signals(self) -> None:
        if self._reports:
            self._reports.look(is_quiet=True)
        for number in self._system.signals.take():
            if number in STOPS:
                self._step(events.Signal(number))
            elif number != signal.SIGCHLD:
                self._pass_on(number)
            elif self._child and self._reports:
                for pid, exit_code in self._system.reap():
                    self._reaped(pid, exit_code, self._reports)

    def _pass_on(self, number: int) -> None:
        """Give an early warning to the ranks that handle it: others would die of it."""
        if number not in WARNINGS:
            self._system.log(left_alone(number))
            return
        pids = [rank.pid for rank in self.state.alive]
        handle = [p for p in pids if self._system.response(p, number) is Disposition.HANDLES]
        for pid in handle:
            self._system.send(pid, number)
        self._system.log(passed_on(number, len(handle), len(pids)))

    def _reaped(self, pid: int, exit_code: int, reports: Reports) -> None:
        if pid != self._child:
            reports.ended(pid, exit_code)
            reports.child_ended(events.OrphanEnded())
            return
        if not self.state.runner:
            reports.child_ended(events.TorchrunEnded(exit_code))
        reports.child_ended(events.ChildEnded(exit_code))

    # What is done.

    def _do(self, action: Any) -> None:
        system = self._system
        if isinstance(action, Log):
            system.log(action.line)
        elif isinstance(action, events.Tell):
            self._channel.say(action.message)
        elif isinstance(action, events.StartTorchrun):
            try:
                self._start_torchrun(action.attempt)
            except Exception as error:
                self._cannot_start(error)
        elif isinstance(action, events.Answer):
            if self._reports:
                self._reports.answer(action)
        elif isinstance(action, events.SignalRanks):
            self._signal_ranks(action)
        elif isinstance(action, events.SignalGroup):
            system.send_members(action.pid, action.number)
        elif isinstance(action, events.SignalChild):
            system.send_group(self._child, action.number)
        elif isinstance(action, events.KillTorchrun):
            torchrun = self._reports.torchrun if self._reports and self.state.runner else 0
            system.send(torchrun or self._child, signal.SIGKILL)
        elif isinstance(action, events.KillRanks):
            for pid in action.pids:
                system.send_group(pid, signal.SIGKILL)
        elif isinstance(action, events.SignalProcesses):
            for pid in action.pids:
                system.send_found(pid, action.number)
        elif isinstance(action, events.RequestPlaces):
            self._where = self._ask(may_signal=True)
        elif isinstance(action, events.CheckGpus):
            self._ask_gpus()
        elif isinstance(action, events.CancelGpuCheck):
            self._stop_asking_gpus()
        elif isinstance(action, events.FindLeftovers):
            self._step(events.LeftoversFound(tuple(self._look())))

    def _start_torchrun(self, attempt: int) -> None:
        plan = self._plan
        if isinstance(plan, Exception):
            return  # which is about to be told
        environment = {**self._environ, **plan.environment}
        if self._channel.own_address:
            resolves = self._channel.own_name_resolves
            plan = reached_at(plan, self._channel.own_address, resolves, environment)
            environment.update(plan.environment)
        job = self.state.job
        if attempt > 1:
            self._begin_attempt(job)
        mark = self._mark = self._mark or os.path.basename(self._folder)  # no other launcher's
        # A relative TMPDIR leads there from this process's folder alone.
        own = os.path.abspath(self._folder) if plan.folder else self._folder
        environment.update({RUN_DIR: own, JOB_MARK: mark})
        if not job.torchrun_restarts:
            plan, environment = for_attempt(plan, environment, attempt)
        if job.members:
            environment.setdefault(EXIT_BARRIER, _NEVER)
        *argv, watcher = unpacked((*plan.argv, IN_RANK), self._folder)
        if job.watch:
            environment[WATCHER] = watcher
        self._child = self._system.start(
            argv, environment, (JOB_MARK, mark), tied=bool(plan.runner), folder=plan.folder
        )

    def _begin_attempt(self, job: Job) -> None:
        """Make the folder of an attempt, where its ranks report. Raises LaunchError."""
        self._end_attempt()
        self._folder = self._stack.enter_context(self._system.folder(self._environ))
        self._watch, self._shows, self._where = _watch(job), {}, 0
        self._reports = Reports(self._folder, self._system, self._hear, self._watch, self._runner)

    def _end_attempt(self) -> None:
        if self._reports:
            self._reports.close()
            self._reports = None
        self._stack.close()

    def _watch_ranks(self, now: float) -> None:
        question = self._watch.poll(now)
        if question and self._reports:
            self._reports.ask(question)
        succeeded = {pid for pid, rank in self.state.ranks.items() if rank.exit_code == 0}
        running = {rank.pid for rank in self.state.alive}
        report = self._watch.report(succeeded, self._system.state_of, now, running)
        if report:
            self._channel.say(ProgressReport(self.state.attempt, report.ranks, report.others))
        is_to_say = self.state.job.verbose or self.state.job.hang_timeout < math.inf
        if is_to_say and self._watch.error not in self._said:
            self._said.add(self._watch.error)
            self._system.log(self._watch.error)
        self._tell_where(now)

    def _ask(self, *, may_signal: bool) -> int:
        """Ask all ranks where they are; return the number of the question."""
        asked, question = self._watch.request_stacks(self._system.now(), may_signal=may_signal)
        if self._reports:
            self._reports.ask(question)
        return asked.number

    def _tell_where(self, now: float) -> None:
        """Tell where ranks are, of all that was asked and is known now, as far as it will be."""
        system = self._system
        for pid, number in self._watch.signals_due(now).items():
            runs = system.state_of(pid) in ("R", "S")
            if runs and system.response(pid, number) is Disposition.HANDLES:
                system.send(pid, number)
        for asked in self._watch.requests_over(now):
            alive = self.state.alive
            places = {rank.pid: stacks.place(asked.calls(rank.pid)) for rank in alive}
            if asked.number == self._where:
                self._step(events.PlacesReported(places))
            if asked.number in self._shows:
                texts = {one.rank: asked.text(one.pid, system.state_of(one.pid)) for one in alive}
                number = self._shows.pop(asked.number)
                self._channel.say(HostStacks(number, stacks.grouped(texts)))

    def _ask_gpus(self) -> None:
        def then(text: str) -> None:
            said = gpu_health.broken(text, self._environ)
            host = self.state.job.current_host
            self._step(events.GpusChecked(said and printable(f"{host}, {said}")))

        self._stop_asking_gpus()
        self._question = self._system.ask(gpu_health.COMMAND, self._environ, then)
        if self._question is None:
            then("")

    def _stop_asking_gpus(self) -> None:
        if self._question:
            self._question.close()
            self._question = None

    def _look(self) -> list[int]:
        try:
            return self._system.look(self._child)
        except OSError:  # no descriptor is left for /proc: ranks have them
            if self._reports:
                self._reports.hang_up()
            return self._system.look(self._child)

    def _cannot_start(self, error: Exception) -> None:
        job = self.state.job
        if isinstance(error, LaunchError):
            text = f"launcher: {job.current_host}: {error}" if job.members else f"launcher: {error}"
            # At a restart what was to be run is right, and something of it was started.
            code = error.exit_code if self.state.attempt <= 1 else EXIT_SOFTWARE
            failure = of_host(text, code)
        else:
            self._log_traceback(error)
            failure = self._own_failure(error)
        self._step(events.CannotStart(failure))

    def _signal_ranks(self, action: events.SignalRanks) -> None:
        if self._reports:
            self._reports.tell_signalled(action.pids)
        disposition = {pid: self._system.response(pid, action.number) for pid in action.pids}
        for pid in action.pids:
            self._system.send(pid, action.number)
        self._step(events.Signalled(disposition))


def _watch(job: Job) -> Watch:
    return Watch(job.watch, min(job.hang_notify, job.hang_timeout))
