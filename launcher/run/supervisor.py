"""The loop of one host: turns what happens into events, and carries out what the rules decide.

torchrun runs in a session of its own with the launcher's stdin, stdout and stderr. One loop waits
for its end, for signals, for what the ranks report and for the other hosts; nothing polls while a
job runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import LaunchError
from launcher.events import AllJoined, Log
from launcher.job.options import EXIT_BARRIER, JOB_MARK, RUN_DIR
from launcher.job.plan import LaunchPlan
from launcher.job.prepare import reached_at
from launcher.log import log
from launcher.processes import Processes, reap, response, send, session, signal_torchrun, start
from launcher.result.causes import Cause, Failure
from launcher.run import events, host, machine
from launcher.run.host import Host
from launcher.run.reports import Reports
from launcher.run.run_dir import run_dir, unpacked
from launcher.run.state import Job, State
from launcher.signals import Signals

if TYPE_CHECKING:
    import psutil

    from launcher.peers.transport import Channel  # one host needs none, nor the 7 ms to import it

# No host leaves one that still trains, however long it does. In seconds; torch counts 2**31 ms at
# most.
_NEVER = str(20 * 86400)


def run(
    job: Job,
    plan: LaunchPlan | LaunchError,
    environ: Mapping[str, str],
    signals: Signals,
    channel: Channel | None = None,
) -> State:
    """Run this host's share of the job to its end; return the state at the end, with its result.

    `plan` is what to start, or why it cannot be started, which the other hosts are told. Raises
    LaunchError if torchrun cannot be started on a host that is alone (exit code 126, 127 or 2), and
    if the channel between hosts cannot be used.
    """
    with contextlib.ExitStack() as stack:
        return _Supervisor(job, plan, environ, signals, channel, stack).run()


class _Supervisor:
    """The effects: what is open and running. What is known and decided is in `_host`."""

    def __init__(
        self,
        job: Job,
        plan: LaunchPlan | LaunchError,
        environ: Mapping[str, str],
        signals: Signals,
        channel: Channel | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._host = Host(machine.begin(job, time.monotonic()))
        self._plan = plan
        self._environ = environ
        self._signals = signals
        self._channel = channel
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._reports: Reports | None = None
        self._processes: Processes
        self._found: dict[int, psutil.Process] = {}  # when they were looked for last
        self._carry_out: dict[type, Callable[[Any], None]] = {
            Log: lambda action: log(action.line),
            events.Start: self._start,
            events.SignalTorchrun: self._signal_torchrun,
            events.SignalProcesses: self._signal_processes,
            events.SignalGroup: self._signal_group,
            events.NoteResponses: self._note_responses,
            events.Answer: self._answer,
            events.Look: self._look,
        }

    def run(self) -> State:
        """Wait and act until this host has nothing left to do."""
        try:
            self._begin()
            while not self._host.is_done:
                self._wait()
        except LaunchError:
            # If this host cannot start, that counts, and not an error in telling it.
            failure = self._host.run.failure
            if failure is None or self._torchrun:
                raise
            return self._host.run._replace(result=failure.result)
        finally:
            self._kill_torchrun()
        return self._host.run

    def _begin(self) -> None:
        if self._channel:
            self._selector.register(self._channel, selectors.EVENT_READ, self._on_peers)
            peers, actions = self._channel.begin()
            self._host = self._host._replace(peers=peers)
            self._do(actions)
        self._on_signals()  # a stop that came before anything was started
        if isinstance(self._plan, LaunchError):
            self._cannot_start(self._plan)
        elif not self._channel:
            self._step(AllJoined(""))

    def _wait(self) -> None:
        """Act on what happens until something is due."""
        has_ended = self._torchrun is not None and self._torchrun.returncode is not None
        end_is_untold = has_ended and self._host.run.returncode is None
        ready = self._selector.select(0 if end_is_untold else self._timeout())
        for key, _ in ready:
            key.data()
        if self._reports:
            self._reports.look()
        if end_is_untold and not ready and self._reports and self._torchrun:
            # Everything that was sent before has been read.
            self._step(self._reports.ended(self._torchrun.returncode))
        now = time.monotonic()
        if now >= host.due(self._host):
            self._after(*host.tick(self._host, now))

    def _timeout(self) -> float | None:
        seconds = max(0.0, host.due(self._host) - time.monotonic())
        look = self._reports.timeout() if self._reports else None
        seconds = seconds if look is None else min(seconds, look)
        return None if math.isinf(seconds) else seconds

    def _step(self, event: Any) -> None:
        self._after(*host.step(self._host, event, time.monotonic()))

    def _after(self, after: Host, actions: list[Any]) -> None:
        self._host = after
        self._do(actions)

    def _do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            act = self._carry_out.get(type(action))
            if act:
                act(action)
            elif self._channel:
                self._channel.carry_out(action)

    # What happens

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number != signal.SIGCHLD:
                self._step(events.Signal(number))
            elif self._torchrun:
                reap(self._torchrun)
                self._step(events.ChildEnded())

    def _told(self, event: Any) -> None:
        if isinstance(event, events.RankStarted):
            self._processes.add(event.pid)  # also for what is left of it when ranks have restarted
        self._step(event)

    def _on_peers(self) -> None:
        assert self._channel
        for event in self._channel.events():
            self._after(*host.hear(self._host, event, time.monotonic()))

    # What is done

    def _start(self, action: events.Start) -> None:
        try:
            self._start_torchrun(action)
        except LaunchError as error:
            if not self._channel:
                raise
            self._cannot_start(error)

    def _start_torchrun(self, action: events.Start) -> None:
        plan = self._plan
        assert isinstance(plan, LaunchPlan)
        environment = {**self._environ, **plan.environment}
        if action.own_address:
            plan = reached_at(plan, action.own_address, action.name_leads_here, environment)
            environment.update(plan.environment)
        folder = self._stack.enter_context(run_dir(self._environ))
        self._reports = Reports(folder, self._selector, self._told, plan.runner)
        self._stack.callback(self._reports.close)
        environment[RUN_DIR] = folder
        mark = os.path.basename(folder)  # no other launcher's
        environment[JOB_MARK] = mark
        if self._channel:
            environment.setdefault(EXIT_BARRIER, _NEVER)
        self._processes = Processes((JOB_MARK, mark))
        argv = unpacked(plan.argv, folder)
        self._torchrun = start(argv, environment, new_session=True, tied=bool(plan.runner))
        self._processes.add(self._torchrun.pid)
        if self._channel:
            self._channel.give_back_limit(self._torchrun.pid)

    def _cannot_start(self, error: LaunchError) -> None:
        text = f"launcher: {self._host.run.job.current_host}: {error}\n"
        self._step(events.CannotStart(Failure(Cause.OWN, error.exit_code, text)))

    def _signal_torchrun(self, action: events.SignalTorchrun) -> None:
        if self._torchrun and self._torchrun.returncode is None and self._reports:
            signal_torchrun(self._torchrun.pid, self._reports.torchrun, action.number)

    def _signal_processes(self, action: events.SignalProcesses) -> None:
        for pid in action.pids:
            send(self._found.get(pid, pid), action.number)

    def _signal_group(self, action: events.SignalGroup) -> None:
        for process in self._processes.of_group(action.pid):
            send(process, action.number)

    def _note_responses(self, action: events.NoteResponses) -> None:
        ranks = self._host.run.alive
        at_stop = {rank.pid: response(rank.pid, action.number) for rank in ranks}
        self._step(events.Responses(at_stop))

    def _answer(self, action: events.Answer) -> None:
        if self._reports:
            self._reports.answer(action.timeout)

    def _look(self, action: events.Look) -> None:
        assert self._torchrun
        left: list[psutil.Process] = []
        if reap(self._torchrun):
            try:
                left = self._processes.all()
            except OSError:  # no descriptor is left for /proc: ranks have them
                if self._reports:
                    self._reports.close()
                left = self._processes.all()
            if action.behind:
                left = self._processes.left_behind(self._torchrun.pid)
        self._found = {process.pid: process for process in left}
        self._step(events.Remaining([(pid, session(pid)) for pid in self._found]))

    def _kill_torchrun(self) -> None:
        """Kill the job if the launcher itself has failed."""
        if self._torchrun and not self._host.is_done:
            for process in self._processes.all():
                send(process, signal.SIGKILL)
