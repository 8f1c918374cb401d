"""The loop of one host: turns what happens into events, and carries out what is decided.

torchrun runs in a session of its own with the launcher's stdin, stdout and stderr. One loop waits
for its end, for signals, for messages of ranks and of other hosts. While a job runs it polls ranks
for their progress every --launcher-watch seconds. The clock, processes, signals and connections are
reached through System; this host's names (reached_at) and files (unpacked) are not.

What happens is taken in one event after the other: all actions of a step are carried out before the
next (_step).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import signal
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Callable

from launcher.errors import STOPS, WARNINGS, Disposition, LaunchError
from launcher.host.child import Question
from launcher.host.journal import Journal
from launcher.host.run_dir import IN_RANK, unpacked
from launcher.host.signals import left_alone
from launcher.host.system import System
from launcher.job import gpu_health
from launcher.job.job import Job, LaunchPlan
from launcher.job.options import EXIT_BARRIER, JOB_MARK, RANK_LOGS, RUN_DIR, WATCHER
from launcher.job.plan import for_attempt
from launcher.job.prepare import reached_at
from launcher.peers.channel import Channel
from launcher.peers.messages import (
    AllStacks,
    CollectStacks,
    HostStacks,
    NoProgressReport,
    StacksRequest,
)
from launcher.result.causes import Failure, of_error, of_launcher
from launcher.run import events, history, machine
from launcher.run.rank_logs import COPIER, RankLogs
from launcher.run.ranks import passed_on
from launcher.run.reports import Reports
from launcher.run.starts import Starts
from launcher.run.state import Done, Joining, State, Why
from launcher.text.log import described, traceback_of
from launcher.text.words import Log, printable
from launcher.watch import stacks
from launcher.watch.host import Watch

# No host leaves one that still trains, however long it does. In seconds; torch counts 2**31 ms at
# most.
_NEVER = str(20 * 86400)
_MOST_TRACEBACKS = 3  # of errors of the launcher itself
_END_IN_ORDER_SECONDS = (
    20.0  # s more than the failure grace for a job to end in order, after such an error
)
Ready = list[tuple[selectors.SelectorKey, int]]


def run(job: Job, environ: Mapping[str, str], system: System) -> State:
    """Run this host's share of the job to its end; return the state at the end, with its result."""
    supervisor = Supervisor(job, environ, system)
    turns = supervisor.turns()
    with contextlib.suppress(StopIteration):
        timeout = next(turns)
        while True:
            timeout = turns.send(ready(system.selector, timeout))
    return supervisor.state


def ready(selector: selectors.BaseSelector, timeout: float | None) -> Ready:
    """Wait for what happens, at most so many seconds; return it.

    If this process was suspended meanwhile, select() says only that the time is over, and not what
    has happened, which comes before what is due.
    """
    return selector.select(timeout) or selector.select(0)


class Supervisor:
    """The effects: what is open and running. What is known and decided is in `state`."""

    def __init__(self, job: Job, environ: Mapping[str, str], system: System) -> None:
        self._environ, self._system = environ, system
        self._stack = contextlib.ExitStack()  # of an attempt
        self._folders = contextlib.ExitStack()  # of all
        self._folder = self._mark = ""
        self._reports: Reports | None = None
        # Numbers of CollectStacks, by those of the requests to ranks.
        self._stacks_requests: dict[int, int] = {}
        self._places_request = 0  # before ranks are killed
        self._logged = {""}  # of what the watch cannot see
        self._errors = 0
        self._starts = Starts(system, self._torchrun_ended, self._start_again)
        self._is_to_search = False  # for leftover processes
        self._found: list[int] | None = None  # what seem to be such
        self._home = ""  # of what a nursery executes, if that is in an archive
        self._attempt = 1  # that the folder is of
        self._gpu_check: Question | None = None  # to the driver of the GPUs
        self._error: Exception | None = None  # the launcher's own, the first
        self._events: deque[Any] = deque()  # to be taken in
        self._is_stepping = False
        self._signals: deque[int] = deque()  # to be taken in
        self._give_up_at = math.inf  # where they go on, or an end is still waited for
        self._watch = _watch(job)
        options, host = job.options, job.current_host
        logs = history.logs_folder(environ, options.log_dir)
        self._logs = RankLogs(system, logs, host, has_prefix=options.log_prefix)
        if isinstance(job.plan, LaunchPlan):
            try:
                self._begin_attempt(job)
            except Exception as error:  # before any host starts anything
                job = job._replace(plan=error)
        self.state = machine.begin(job, system.now())
        self._journal = Journal(history.folder(environ, options.log_dir), host, system.log)
        self._journal.note(history.began, self.state)
        self._channel = Channel(job, system, self._receive, self._note_hosts)

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
            self._end_gpu_check()
            self._starts.close()
            self._end_attempt()
            self._logs.close()
            self._folders.close()
            self._journal.close()

    def _do_what_is_due(self, *, is_quiet: bool) -> None:
        if self._reports:
            if is_quiet:
                self._reports.take_ends()
            if self._reports and self._reports.has_more:
                return  # what has happened comes before a stop, and before what is due
        self._take_signals()
        if is_quiet:
            self._starts.go_on()
            self._search_leftovers()
        now = self._system.now()
        if now >= machine.due(self.state):
            self._step(events.Time())
        if now >= self._starts.due():
            self._starts.is_late()
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
                self._give_up_at = now + self.state.grace(Why.FAILURE) + _END_IN_ORDER_SECONDS
                self._step(events.LauncherFailed(self._own_failure(error)))

    def _ends_by(self) -> float:
        """Return until when an end in order is waited for; ranks may have had a stop before."""
        state = self.state
        more = max(0.0, state.grace(Why.STOP) - state.grace(Why.FAILURE)) if state.alive else 0.0
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
            self._channel.report_last(failure)
        with contextlib.suppress(Exception):
            self._on_signals()  # what raised may have been what would have noted ends
        pids = self._reports.pids if self._reports else []
        try:
            self._system.end_all(pids, self.state.grace(Why.FAILURE))
        except Exception:  # /proc cannot be read
            for leader in (*pids, *self._if_unreaped(self._starts.child)):
                self._system.send_group(leader, signal.SIGKILL)
        result = self.state.result or failure.result
        self.state = self.state._replace(phase=Done(), result=result)

    def _begin(self) -> None:
        self._system.selector.register(self._system.signals, selectors.EVENT_READ, self._on_signals)
        self._on_signals()
        self._take_signals()  # a stop that came before anything was started
        if not isinstance(self.state.phase, Done):
            self._begin_nursery()  # one host alone starts at once
            self._channel.begin()
        if isinstance(self.state.job.plan, Exception):
            self._cannot_start(self.state.job.plan)

    def _timeout(self) -> float | None:
        due = min(machine.due(self.state), self._channel.due(), self._watch.due(), self._ends_by())
        due = min(due, self._starts.due())
        seconds = max(0.0, due - self._system.now())
        if (
            self._is_to_search
            or self._found is not None
            or self._starts.has_more
            or (self._reports and self._reports.has_more)
        ):
            return 0
        return None if math.isinf(seconds) else seconds

    def _receive(self, event: Any) -> None:
        """Take in a message of the coordinator, a rank or somebody else at this host."""
        if isinstance(event, StacksRequest):
            self._channel.report(event)
        elif isinstance(event, CollectStacks):
            self._stacks_requests[self._request_calls(may_signal=event.may_signal)] = event.number
            self._report_places(self._system.now())
        elif isinstance(event, AllStacks):
            job, lines = self.state.job, list(event.lines)
            # The same on all hosts whose launchers talk, and another job's is not.
            key = job.endpoint if job.has_peers else self._mark
            message = {"job": job.cluster.job_name, "key": key, "lines": lines}
            if self._reports:
                self._reports.reply_stacks(message)
        else:
            if isinstance(event, events.TorchrunRuns) and self._reports:
                self._starts.runs(self._reports.torchrun)
            if isinstance(event, events.StartRequested):
                self._channel.world = event.world
                self._logs.follow([rank for rank, _ in event.ranks])
            self._step(event)

    def _step(self, event: Any) -> None:
        """Take an event in, and do what is decided: all of that before the next event is taken in.

        What is done may bring events about: a report to the coordinator of this host, commands; the
        search for leftover processes, what it finds. They come after all actions of this step.
        """
        self._events.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._events:
                for action in self._decide(self._events.popleft()):
                    self._do(action)
        finally:
            self._is_stepping = False

    def _decide(self, event: Any) -> events.Actions:
        before, now = self.state, self._system.now()
        self.state, actions = machine.step(before, event, now)
        self._journal.note(history.of_run, before, event, self.state, actions, now)
        if before.job.options.verbose:
            began = before.times.began
            line = described("run", before, event, self.state, actions, now - began)
            if line:
                self._system.log(line)
        return actions

    def _note_hosts(self, before: Any, event: Any, after: Any, now: float) -> None:
        host, began = self.state.job.current_host, self.state.times.began
        self._journal.note(history.of_hosts, before, event, after, host, now, began)

    def _on_signals(self) -> None:
        numbers, reports = self._system.signals.take(), self._reports
        if signal.SIGCHLD in numbers and reports and self._starts.has_children:
            for pid, exit_code in self._system.reap():
                self._reaped(pid, exit_code, reports)
        self._signals.extend(number for number in numbers if number != signal.SIGCHLD)

    def _take_signals(self) -> None:
        """Take in signals: ends have come before, whatever the place of their signal is."""
        while self._signals:
            number = self._signals.popleft()
            if number in STOPS:
                self._step(events.Signal(number))
            else:
                self._pass_on(number)

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
        if self._starts.is_nursery(pid, exit_code) or self._logs.has_ended(pid):
            return
        if pid != self._starts.child:
            reports.child_ended(events.OrphanEnded(pid, exit_code))  # or a rank
            return
        reports.exit_codes[pid] = exit_code  # as of the others
        self._torchrun_ended(exit_code)

    def _torchrun_ended(self, exit_code: int) -> None:
        reports = self._reports
        if reports is None:
            return
        if not self.state.job.runner:
            reports.child_ended(events.TorchrunEnded(exit_code))
        reports.child_ended(events.ChildEnded(exit_code))

    # What is done.

    def _do(self, action: Any) -> None:
        do = ACTIONS.get(type(action))
        if do is None:
            self._system.log(f"the supervisor does not know {type(action).__name__}.")
        else:
            do(self, action)

    def _do_log(self, action: Log) -> None:
        self._system.log(action.line)

    def _do_report(self, action: events.Report) -> None:
        self._channel.report(action.message)

    def _do_start_torchrun(self, action: events.StartTorchrun) -> None:
        try:
            self._start_torchrun(action.attempt)
        except Exception as error:
            self._cannot_start(error)

    def _do_reply(self, action: events.Reply) -> None:
        if self._reports:
            self._reports.reply(action)

    def _do_reply_to_rank(self, action: events.ReplyToRank) -> None:
        if self._reports:
            self._reports.reply_to_rank(action.pid, lets_go=action.lets_go)

    def _do_signal_group(self, action: events.SignalGroup) -> None:
        self._system.send_rest_of_group(action.pid, action.number)

    def _do_signal_child(self, action: events.SignalChild) -> None:
        for leader in self._if_unreaped(self._starts.child):
            self._system.send_group(leader, action.number)

    def _do_kill_torchrun(self, action: events.KillTorchrun) -> None:
        # Where a program runs torchrun, that is our child.
        torchrun = self._reports.torchrun if self._reports and self.state.job.runner else 0
        child = torchrun or self._starts.child
        if not child:
            self._starts.kill_early()
        for pid in self._if_unreaped(child):
            self._system.send(pid, signal.SIGKILL)

    def _do_kill_ranks(self, action: events.KillRanks) -> None:
        for pid in self._unreaped(action.pids):
            self._system.send_group(pid, signal.SIGKILL)

    def _do_signal_processes(self, action: events.SignalProcesses) -> None:
        for pid in action.pids:
            self._system.send_leftover(pid, action.number)

    def _do_request_places(self, action: events.RequestPlaces) -> None:
        self._places_request = self._request_calls(may_signal=True)

    def _do_find_leftovers(self, action: events.FindLeftovers) -> None:
        self._is_to_search = True

    def _start_torchrun(self, attempt: int) -> None:
        job = self.state.job
        plan = job.plan
        if isinstance(plan, Exception):
            return  # which is about to be reported
        environment = {**self._environ, **plan.environment}
        if self._channel.own_address:
            resolves = self._channel.own_name_resolves
            plan = reached_at(plan, job, self._channel.own_address, resolves, environment)
            environment.update(plan.environment)
        if attempt > self._attempt:
            self._begin_attempt(job)
            self._attempt = attempt
        # A relative TMPDIR leads there from this process's folder alone.
        own = os.path.abspath(self._folder) if job.options.folder else self._folder
        environment.update({RUN_DIR: own, JOB_MARK: self._mark})
        plan, environment = for_attempt(plan, environment, attempt)
        if job.members:
            environment.setdefault(EXIT_BARRIER, _NEVER)
        home = self._home or self._folder
        *argv, watcher, copier = unpacked((*plan.argv, IN_RANK, COPIER), home)
        self._logs.begin(attempt)
        if self._logs.folder:
            environment[RANK_LOGS] = self._logs.folder
        if job.options.watch:
            environment[WATCHER] = watcher
        mark = JOB_MARK, self._mark
        tied, folder = bool(plan.runner), job.options.folder
        self._starts.start(argv, environment, mark, tied=tied, folder=folder)
        self._logs.start((sys.executable, copier), self._environ, mark)

    def _begin_nursery(self) -> None:
        job, plan = self.state.job, self.state.job.plan
        if isinstance(plan, Exception) or not plan.nursery:
            return
        home = self._home = self._folders.enter_context(self._system.folder(self._environ))
        mark = JOB_MARK, self._mark
        environ = {**self._environ, **plan.environment, JOB_MARK: self._mark}
        self._starts.begin_warm(unpacked(plan.nursery, home), environ, mark, job.options.folder)

    def _start_again(self) -> None:
        self._begin_attempt(self.state.job)
        self._do_start_torchrun(events.StartTorchrun(self.state.attempt))

    def _begin_attempt(self, job: Job) -> None:
        """Make the folder of an attempt, where its ranks report. Raises LaunchError."""
        self._end_attempt()
        self._folder = self._stack.enter_context(self._system.folder(self._environ))
        self._mark = self._mark or os.path.basename(self._folder)  # no other launcher's
        self._watch, self._stacks_requests, self._places_request = _watch(job), {}, 0
        self._reports = Reports(
            self._folder,
            self._system,
            self._receive,
            self._watch,
            job.runner,
            self._logs.last_lines,
        )

    def _end_attempt(self) -> None:
        if self._reports:
            self._reports.close()
            self._reports = None
        self._stack.close()

    def _watch_ranks(self, now: float) -> None:
        request = self._watch.poll(now)
        if request and self._reports:
            self._reports.request(request)
        succeeded = {pid for pid, rank in self.state.ranks.items() if rank.exit_code == 0}
        running = {rank.pid for rank in self.state.alive}
        report = self._watch.report(succeeded, self._system.state_of, now, running)
        if report:
            self._channel.report(NoProgressReport(self.state.attempt, report.ranks, report.others))
        is_to_say = self.state.job.options.verbose or self.state.job.options.hang_timeout < math.inf
        if is_to_say and self._watch.error not in self._logged:
            self._logged.add(self._watch.error)
            self._system.log(self._watch.error)
        self._report_places(now)

    def _request_calls(self, *, may_signal: bool) -> int:
        """Request from all ranks where they are; return the number of the request."""
        gathered, request = self._watch.request_stacks(self._system.now(), may_signal=may_signal)
        if self._reports:
            self._reports.request(request)
        return gathered.number

    def _report_places(self, now: float) -> None:
        """Report where ranks are, for each request whose replies are in, or overdue."""
        system = self._system
        for pid, number in self._watch.signals_due(now).items():
            runs = system.state_of(pid) in ("R", "S")
            if runs and system.response(pid, number) is Disposition.HANDLES:
                system.send(pid, number)
        for request in self._watch.requests_over(now):
            alive = self.state.alive
            places = {rank.pid: stacks.place(request.calls(rank.pid)) for rank in alive}
            if request.number == self._places_request:
                self._step(events.PlacesReported(places))
            if request.number in self._stacks_requests:
                texts = {one.rank: request.text(one.pid, system.state_of(one.pid)) for one in alive}
                number = self._stacks_requests.pop(request.number)
                self._channel.report(HostStacks(number, stacks.grouped(texts)))

    def _do_check_gpus(self, action: events.CheckGpus) -> None:
        def then(text: str) -> None:
            broken = gpu_health.broken(text, self._environ)
            host = self.state.job.current_host
            self._step(events.GpusChecked(broken and printable(f"{host}, {broken}")))

        self._end_gpu_check()
        self._gpu_check = self._system.ask(gpu_health.COMMAND, self._environ, then)
        if self._gpu_check is None:
            then("")

    def _do_cancel_gpu_check(self, action: events.CancelGpuCheck) -> None:
        self._end_gpu_check()

    def _end_gpu_check(self) -> None:
        if self._gpu_check:
            self._gpu_check.close()
            self._gpu_check = None

    def _search_leftovers(self) -> None:
        """Search; once all is read, say what was found, without ranks that were not let go.

        A rank, or a torchrun that was forked, becomes a child of ours after it has reported itself.
        """
        found, self._found = self._found, None
        if self._is_to_search:
            self._is_to_search, self._found = False, self._leftovers()
        elif found is not None:
            known = {self._starts.child, *(self._reports.known if self._reports else ())}
            self._step(events.LeftoversFound(tuple(pid for pid in found if pid not in known)))

    def _leftovers(self) -> list[int]:
        try:
            return self._system.leftovers(self._starts.child)
        except OSError:  # no descriptor is left for /proc: ranks have them
            if self._reports:
                self._reports.close_sockets()
            return self._system.leftovers(self._starts.child)

    def _cannot_start(self, error: Exception) -> None:
        job = self.state.job
        if isinstance(error, LaunchError):
            host = job.current_host if job.members else ""
            failure = of_error(error, host, attempt=self.state.attempt)
        else:
            self._log_traceback(error)
            failure = self._own_failure(error)
        self._step(events.CannotStart(failure))

    def _do_signal_ranks(self, action: events.SignalRanks) -> None:
        pids = self._unreaped(action.pids)
        disposition = {pid: self._system.response(pid, action.number) for pid in pids}
        for pid in pids:
            self._system.send(pid, action.number)
        self._step(events.Signalled(disposition))

    def _if_unreaped(self, pid: int) -> Sequence[int]:
        """Return that alone, or nothing if it is none, or may be anybody's by now."""
        is_reaped = self._reports is not None and pid in self._reports.exit_codes
        return () if is_reaped or not pid else (pid,)

    def _unreaped(self, pids: Sequence[int]) -> list[int]:
        """Return those that are still ranks': others may be anybody's by now."""
        known = self._reports.pids if self._reports else ()
        return [pid for pid in pids if pid in known]


def _watch(job: Job) -> Watch:
    return Watch(job.options.watch, min(job.options.hang_notify, job.options.hang_timeout))


ACTIONS: dict[type, Callable[[Supervisor, Any], None]] = {
    Log: Supervisor._do_log,
    events.Report: Supervisor._do_report,
    events.StartTorchrun: Supervisor._do_start_torchrun,
    events.Reply: Supervisor._do_reply,
    events.ReplyToRank: Supervisor._do_reply_to_rank,
    events.SignalRanks: Supervisor._do_signal_ranks,
    events.SignalGroup: Supervisor._do_signal_group,
    events.SignalChild: Supervisor._do_signal_child,
    events.SignalProcesses: Supervisor._do_signal_processes,
    events.KillTorchrun: Supervisor._do_kill_torchrun,
    events.KillRanks: Supervisor._do_kill_ranks,
    events.RequestPlaces: Supervisor._do_request_places,
    events.FindLeftovers: Supervisor._do_find_leftovers,
    events.CheckGpus: Supervisor._do_check_gpus,
    events.CancelGpuCheck: Supervisor._do_cancel_gpu_check,
}
