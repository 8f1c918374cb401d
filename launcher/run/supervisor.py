"""The loop of one host: turns what happens into events, and carries out the decided actions.

The loop waits for keepers (keepers.py), launchers of other hosts, signals, and ends of children.
While a job runs it polls the ranks for their progress every --launcher-watch seconds. It reaches
the clock, processes, signals and connections through System, but not this host's names (reached_at)
and files.

It handles one event at a time (stepping.py). An error of the launcher itself is reported to the
other hosts; then all connections are closed, so that keepers end their ranks, and this process
waits for that.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
from collections.abc import Callable, Generator, Mapping
from typing import Any

from launcher import PACKAGE
from launcher.errors import WARNINGS, LaunchError
from launcher.host.child import Helper
from launcher.host.folders import files_below, remove
from launcher.host.journal import Journal, host_folder
from launcher.host.stepping import Stepping
from launcher.host.system import System
from launcher.job.job import Job
from launcher.job.options import BARS, EVENTS_DIR, INIT, INTERNAL, JOB_MARK, RUN_DIR
from launcher.job.prepare import reached_at
from launcher.job.toolkit import base_dir, config_dir
from launcher.peers.channel import Channel
from launcher.peers.events import StoreMade, Time
from launcher.peers.messages import Cleared, Start, Stop
from launcher.result.causes import SUCCESS, Failure, of_error, of_launcher
from launcher.run import events, machine, summary
from launcher.run.keepers import Keepers
from launcher.run.ranks import may_follow_stop
from launcher.run.state import Done, Ending, Leaving, State, Why
from launcher.run.torchrun import Torchrun
from launcher.text.log import traceback_of
from launcher.text.words import NAMED, Note, printable
from launcher.warm import start as warm
from launcher.watch.host import Watch
from launcher.watch.waits import AllStacks, CollectStacks, StacksRequest

STORE = os.path.join(PACKAGE, "run", "store.py")
IN_RANK = os.path.join(PACKAGE, "watch", "in_rank.py")
_LAST_SECONDS = 10.0  # more than the grace, for leftovers after an error of the launcher itself
_OF_TORCHRUN = ("TMPDIR", "PYTHONSAFEPATH")  # scripts get this process's values of these
# Below /opt/ml; the folder that a stop should fill is the last.
_UPLOADED = ("model", os.path.join("output", "data"), "checkpoints")
# A loop that is so late was suspended or blocked: no deadline counts for that time.
_LATE_SECONDS = 1.0
_LOOK_SECONDS = 0.1  # between two checks for leftovers
Ready = list[tuple[selectors.SelectorKey, int]]


def run(job: Job, environ: Mapping[str, str], system: System) -> State:
    """Run this host's share of the job to its end; return the final state, with its result."""
    supervisor = Supervisor(job, environ, system)
    turns = supervisor.turns()
    with contextlib.suppress(StopIteration):
        timeout = next(turns)
        while True:
            timeout = turns.send(ready(system.selector, timeout))
    return supervisor.state


def ready(selector: selectors.BaseSelector, timeout: float | None) -> Ready:
    """Wait for something to happen, for at most `timeout` seconds; return it.

    If this process was suspended meanwhile, select() may only report a timeout. So poll again: what
    has happened comes before what is due.
    """
    return selector.select(timeout) or selector.select(0)


class Supervisor(Stepping):
    """The effects: open connections and running processes. `state` has all that is decided."""

    state: State

    def __init__(
        self,
        job: Job,
        environ: Mapping[str, str],
        system: System,
        start_torchrun: Callable[..., Torchrun] = Torchrun,
    ) -> None:
        self._environ, self._system = environ, system
        self._torchrun_of = start_torchrun
        self._open = contextlib.ExitStack()  # closed at the end, the last first
        self._folder = ""
        self._torchrun: Torchrun | None = None
        self._warm: Helper | None = None
        self._store: Helper | None = None
        self._error: Exception | None = None  # the launcher's own
        # Below another launcher, whose files these would be, nothing is written.
        self._log_dir = "" if environ.get(JOB_MARK) else job.options.log_dir
        folder = events_folder(environ, job.options.log_dir)
        self._journal = Journal(folder, job.current_host, system.now(), system.log)
        self._open.callback(self._journal.flush)
        self._keepers = Keepers(system, self._receive, _watch(job, system))
        self._plan = job.plan
        if not job.error:
            try:
                self._folder, listener = system.run_dir(environ)
                self._open.callback(remove, self._folder)
                self._keepers.listen(listener)
            except Exception as error:  # before any host has started anything
                job = Job(job.cluster, job.options, error=error)
        self._open.callback(self._keepers.close)
        name = "run" if job.options.verbose else ""
        state = machine.begin(job, system.now())
        super().__init__(system, state, machine.step, self._write_note, name)
        self._note(Note("began", job=job.cluster.job_name))
        self._channel = Channel(job, system, self._receive, self._note)

    def turns(self) -> Generator[float | None, Ready, None]:
        """Wait and act until this host has nothing left to do.

        Yields how long to wait at most, None for ever; receives what the selector found ready.
        """
        try:
            self._safely(self._begin)
            self._safely(self._do_what_is_due)  # if nothing is to be started, all is over already
            woke = self._system.now()
            while not (self._error or isinstance(self.state.phase, Done)):
                due = max(self._due(), woke)
                wait = due - self._system.now()
                ready = yield None if math.isinf(wait) else max(0.0, wait)
                woke = self._system.now()
                if woke > due + _LATE_SECONDS:
                    self._system.stood_still(woke - due)
                    woke = due
                # Signals last: events from before a stop come first.
                for key, _ in sorted(ready, key=lambda one: one[0].data == self._on_signals):
                    if self._system.selector.get_map().get(key.fd) is key:  # otherwise it is closed
                        self._safely(key.data)
                self._safely(self._do_what_is_due)
            if self._error:
                yield from self._end_after(self._error)
            if self.state.result:
                self._note(self.state.result.note)
        finally:
            if self._torchrun:
                self._system.kill_children()
            self._channel.close()
            self._open.close()

    def _begin(self) -> None:
        self._system.selector.register(self._system.signals, selectors.EVENT_READ, self._on_signals)
        self._on_signals()  # a stop may have arrived before any start
        self._begin_warm()
        self._channel.begin()
        if self.state.job.error:
            self._cannot_start(self.state.job.error)

    def _due(self) -> float:
        return min(machine.due(self.state), self._channel.due(), self._keepers.watch.due())

    def _do_what_is_due(self) -> None:
        now = self._system.now()
        if now >= machine.due(self.state):
            self.happens(Time())
        if now >= self._channel.due():
            self._channel.tick()
        if now >= self._keepers.watch.due():
            self._watch_ranks(now)
        # The last of these wakes the loop: a keeper's connection ends, or SIGCHLD arrives.
        leaves = isinstance(self.state.phase, Leaving) and not self.state.torchrun_runs
        if leaves and self._keepers.are_gone and not self._system.children():
            self.happens(events.NothingLeft())

    # Errors of the launcher itself.

    def _safely(self, act: Callable[[], None]) -> None:
        """Call a function, whose error ends this launcher."""
        try:
            if not self._error:
                act()
        except Exception as error:
            self._error = error

    def _end_after(self, error: Exception) -> Generator[float | None, Ready, None]:
        """Report the error and close everything; wait until nothing is left."""
        failure = self._own_failure(error)
        with contextlib.suppress(Exception):
            self._channel.report_last(failure)
            self._channel.close()
        self._keepers.close()
        # Until Leaving, keepers below it give the ranks, and what these have left, the grace.
        self._kill_torchrun(below=isinstance(self.state.phase, Leaving))
        selector = self._system.selector
        for key in list(selector.get_map().values()):  # nothing would read them now
            selector.unregister(key.fileobj)
        deadline = self._system.now() + self.state.grace(Why.STOP) + _LAST_SECONDS
        while self._torchrun and self._system.children() and self._system.now() < deadline:
            yield _LOOK_SECONDS
        result = self.state.result or failure.result
        if result == SUCCESS and self.state.job.plan.runner and self.state.torchrun_runs:
            result = failure.result  # the program was killed
        self._note(failure.note)
        self.state = self.state._replace(phase=Done(), decided=result)

    def _own_failure(self, error: Exception) -> Failure:
        for line in traceback_of(error):
            self._system.log(line)
        return of_launcher(self.state.job.current_host, error)

    def _cannot_start(self, error: Exception) -> None:
        job = self.state.job
        if isinstance(error, LaunchError):
            failure = of_error(error, job.current_host if job.members else "")
        else:
            failure = self._own_failure(error)
        self.happens(failure)

    # What happens.

    def _receive(self, event: Any) -> None:
        """Receive a message from the coordinator, a keeper, or a user at this host."""
        if isinstance(event, (StacksRequest, CollectStacks, AllStacks)):
            self._do(event)  # nothing has to be decided
        else:
            if isinstance(event, Start):
                self._begin_attempt(event.attempt)
            elif may_follow_stop(event):
                self._on_signals()
            self.happens(event)
            if self._warm and 0 < len(self.state.ranks) == self.state.nproc:
                self._warm.close()

    def _begin_attempt(self, attempt: int) -> None:
        job = self.state.job
        self._keepers.watch = _watch(job, self._system, attempt)
        if job.coordinates and attempt <= job.options.max_restarts:
            self._make_store()

    def _on_signals(self) -> None:
        numbers = self._system.signals.take()
        happened: list[Any] = [Stop(number) for number in numbers if number != signal.SIGCHLD]
        if signal.SIGCHLD in numbers and self._torchrun:
            code = self._system.reap().get(self._torchrun.pid)
            if code is not None:
                error = self._torchrun.words() if code > 0 else ""
                oom = self._keepers.oom() if code == -signal.SIGKILL else ""
                # Behind the stops that came before it, and a stop of all processes of this host.
                at = len(happened) if Stop(-code) in happened else numbers.index(signal.SIGCHLD)
                happened.insert(at, events.TorchrunEnded(code, error, oom))
        for event in happened:
            self.happens(event)

    # Actions.

    def _do(self, action: Any) -> None:
        if isinstance(action, events.StartTorchrun):
            try:
                self._start_torchrun()
            except LaunchError as error:  # here, as the caller may have read further messages
                self._cannot_start(error)
        elif isinstance(action, events.RunRanks):
            self._keepers.run(action.ranks, self._start_of_rank)
        elif isinstance(action, events.EndRanks):
            self._keepers.end(action)
        elif isinstance(action, events.LeaveRanks):
            self._keepers.leave(action.exit_code, action.ranks)
        elif isinstance(action, CollectStacks):
            self._keepers.ask(self._keepers.watch.request_stacks(action, self._system.now()))
        elif isinstance(action, AllStacks):
            self._reply_stacks(action)
        elif isinstance(action, events.KillTorchrun):
            self._kill_torchrun(below=bool(self._plan.runner))
        elif isinstance(action, Cleared):
            self._channel.report(action._replace(files=self._files()))
        else:
            self._channel.report(action)

    def _write_note(self, note: Note) -> None:
        self._journal.note(note, self.state.attempt, self._system.now())

    def _files(self) -> int:
        """Count the files that SageMaker would upload, after a stop only new ones; -1: unknown."""
        phase, base = self.state.phase, base_dir(self._environ)
        # SageMaker uploads nothing from the folders of `sm-launch local`.
        is_on_sagemaker = EVENTS_DIR not in self._environ and os.path.isdir(config_dir(base))
        has_run = self.state.times.trains < math.inf and not summary.says_unsaved(self.state)
        if not (isinstance(phase, Ending) and is_on_sagemaker and has_run):
            return -1
        folders = [os.path.join(base, name) for name in _UPLOADED]
        if phase.why is Why.STOP:
            age = self._system.now() - self.state.times.closes
            return files_below(folders[-1:], age)
        return files_below(folders) if phase.why is Why.SUCCESS else -1

    def _start_torchrun(self) -> None:
        job, plan = self.state.job, self.state.job.plan
        if self._channel.own_address:
            has_name = self._channel.own_name_resolves
            plan = reached_at(job, self._channel.own_address, self._environ, has_name=has_name)
        environ = {**self._environ, **plan.environment}
        run_dir = self._folder  # torchrun leaves a log folder behind; that goes with it
        environ |= {RUN_DIR: run_dir, JOB_MARK: os.path.basename(run_dir), "TMPDIR": run_dir}
        # `python -m` would have torchrun import a queue.py of the current folder (Python 3.11).
        environ["PYTHONSAFEPATH"] = "1"
        self._plan = plan
        folder = job.options.folder
        self._torchrun = self._torchrun_of(self._system, plan.argv, environ, folder, run_dir)
        self._open.callback(self._torchrun.drain)

    def _start_of_rank(self, rank: int) -> Mapping[str, Any]:
        """Return the start of a rank's script; a variable that is None is removed."""
        options, attempt = self.state.job.options, self.state.attempt
        environ = {name: self._environ.get(name) for name in (*INTERNAL, *_OF_TORCHRUN)}
        environ[RUN_DIR], environ[JOB_MARK] = None, os.path.basename(self._folder)
        environ[INIT] = None  # a rank is no launcher, and may become a user that is not trusted
        environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt - 1)
        environ["TORCHELASTIC_MAX_RESTARTS"] = str(options.max_restarts)
        if self._plan.master_addr:
            environ["MASTER_ADDR"] = self._plan.master_addr
        if self.state.port:
            environ |= {"MASTER_PORT": str(self.state.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        if options.watch:
            environ["LAUNCHER_WATCHER"] = IN_RANK
        log, tees = self._log_dir, self._plan.tees
        if log:
            folder = host_folder(os.path.abspath(log), self.state.job.current_host)
            log = os.path.join(folder, f"attempt-{attempt}", f"rank-{rank}.log")
        ranks = options.log_ranks
        return {
            "environ": environ,
            "grace": options.grace,
            "ignored": [n for n in WARNINGS if signal.getsignal(n) == signal.SIG_IGN],
            "log": log,
            "shows": not ranks or any(rank in some for some in ranks),
            "prefix": f"[rank {rank}] " if options.log_prefix else "",
            "merges": bool(log) and not tees,  # what torchrun redirects stays so
            "bars": "12" if tees else self._environ.get(BARS, ""),
        }

    def _kill_torchrun(self, *, below: bool) -> None:
        if self._torchrun and self.state.torchrun_runs:
            self._system.kill_tree(self._torchrun.pid, below=below)

    # Helpers.

    def _begin_warm(self) -> None:
        """Start the process that imports torch and forks keepers (warm/)."""
        job = self.state.job
        if job.plan.warm:
            environ = {**self._environ, JOB_MARK: os.path.basename(self._folder)}
            self._warm = warm.begin(self._system, job, environ, self._folder)
            self._open.callback(self._warm.close)

    def _make_store(self) -> None:
        """Have a helper make the next attempt's store; report its port to the coordinator."""
        plan = self.state.job.plan
        if self._store is None:
            environ = {**self._environ, **plan.environment, "OMP_NUM_THREADS": "1"}
            argv = (plan.python, "-u", STORE)
            folder, name = self.state.job.options.folder, "the process that holds the ranks' store"
            self._store = self._system.start_helper(argv, environ, folder, name, self._store_made)
            self._open.callback(self._store.close)
        self._store.send(b"make\n")

    def _store_made(self, message: Mapping[str, Any]) -> None:
        why = str(message.get("why", ""))
        if self._store and "port" not in message:  # it has ended, or was not started
            self._store.close()
            self._system.log(f"{printable(why)}.")
        self._channel.happens(StoreMade(int(message.get("port", 0)), why))

    # Where ranks are, and how far.

    def _watch_ranks(self, now: float) -> None:
        """Poll ranks; report their progress and places if the replies are complete, or overdue."""
        watch = self._keepers.watch
        request = watch.poll(now)
        if request:
            self._keepers.ask(request)
        for pid, number in watch.signals_due(now).items():
            if self._system.state_of(pid) in ("R", "S"):
                self._keepers.ask({"signal": number}, [pid])
        ranks = {rank.pid: rank.exit_code for rank in self.state.ranks.values() if rank.pid}
        oom = (words := self._keepers.oom()) and f"{self.state.job.current_host}: {words}"
        for report in watch.reports(ranks, self._system.state_of, now, oom):
            if report.number != machine.PLACES.number:
                self._channel.report(report)
                continue
            for rank in self.state.alive[:NAMED]:
                if place := watch.place(rank.pid):
                    self._system.log(f"rank {rank.rank} has not exited; it is in {place}.")

    def _reply_stacks(self, event: AllStacks) -> None:
        job = self.state.job
        # Equal on all hosts of this job, and different for another job.
        key = job.endpoint if job.has_peers else self._folder
        message = {"job": job.cluster.job_name, "key": key, "lines": list(event.lines)}
        self._keepers.reply_stacks(message)


def events_folder(environ: Mapping[str, str], log_dir: str) -> str:
    """Return the folder DIR of DIR/HOST/events.jsonl; "" for none, as below another launcher."""
    return "" if environ.get(JOB_MARK) else environ.get(EVENTS_DIR) or log_dir


def _watch(job: Job, system: System, attempt: int = 0) -> Watch:
    return Watch(job.options.watch, job.options.hang_notify, system.cpu_of, attempt)
