"""The hosts: each is a launcher in a session of its own, with its processes; and their loop.

The loop acts when events are due, handles stops, and never waits for a reader of hosts' output.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable

from launcher import PACKAGE
from launcher.errors import CannotExecuteError
from launcher.host import folders, processes
from launcher.host.processes import send, tie_to_this_process, tree
from launcher.host.signals import Signals
from launcher.text.words import signal_name
from launcher_tools.local_options import KILL, LATE, Event
from launcher_tools.local_output import LOGS, POLL_SECONDS, Output

_TO_DIE = 10  # seconds for a process to die of SIGKILL


@dataclass
class Host:
    """Attributes: `number`, N of algo-N; `process`, its launcher, None until it starts.

    It writes to logs in its folder, so that no writer waits for a reader of our output, or needs
    us to live. Ranks have pipes to their keepers there, as on SageMaker.
    """

    number: int
    cpus: frozenset[int]
    folder: str
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """As SageMaker names it."""
        return f"algo-{self.number}"

    @property
    def runs(self) -> bool:
        """Whether its launcher is running."""
        return self.process is not None and self.process.returncode is None

    def start(self, words: Sequence[str]) -> None:
        """Start its launcher. Raises LaunchError."""
        tie = tie_to_this_process()  # after a SIGKILL we cannot stop the job, and nobody else would

        def begin() -> None:
            tie()
            os.sched_setaffinity(0, self.cpus)

        logs = [os.path.join(self.folder, name) for name in LOGS.values()]
        try:
            with open(logs[0], "ab") as out, open(logs[1], "ab") as err:
                self.process = subprocess.Popen(
                    [sys.executable, os.path.join(PACKAGE, "__main__.py"), *words],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    # Otherwise a terminal's Ctrl-C would reach it and its ranks directly.
                    start_new_session=True,
                    preexec_fn=begin,
                )
        except OSError as error:
            problem = f"cannot start the launcher of {self.name}: {error.strerror}."
            raise CannotExecuteError(problem) from None

    def stop(self) -> None:
        """Stop it as SageMaker would: SIGTERM to its launcher."""
        if self.process and self.runs:
            send(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all of its processes; none of them may see another one die first."""
        if self.process and self.runs:
            pid = self.process.pid
            _kill_all(lambda: tree([pid]))

    def tidy(self) -> None:
        """Remove the folder that it left behind if it was killed."""
        if self.process and self.process.returncode and self.process.returncode < 0:
            folders.remove_left(self.process.pid, self.environment)


def _kill_all(find: Callable[[], Sequence[int]]) -> None:
    """Kill all processes that are found: first suspend each, so that it starts no other."""
    held: list[int] = []
    while new := [pid for pid in find() if pid not in held]:
        for pid in new:
            send(pid, signal.SIGSTOP)
        held += new
    for pid in held:
        send(pid, signal.SIGKILL)


@dataclass
class Loop:
    """Runs the hosts to their ends. `was_stopped`: one or all of them got a stop."""

    hosts: Sequence[Host]
    events: Sequence[Event]  # that are still to come
    words: Sequence[str]  # the launchers' arguments
    signals: Signals
    output: Output
    was_stopped: bool = False
    _are_all_stopped: bool = False
    # Children from before this program was executed.
    _others: set[int] = field(default_factory=processes.children)

    def run(self) -> float:
        """Return the seconds of a whole run. Raises LaunchError if a launcher cannot be started."""
        processes.adopt_orphans()  # orphans of a killed launcher become our children
        began = time.monotonic()
        try:
            while self._goes_on():
                while self.events and self.events[0].at <= time.monotonic() - began:
                    event, *self.events = self.events
                    self._do(event)
                select.select([self.signals], [], [], POLL_SECONDS)
                self._on_signals()
                self.output.read()
        finally:
            self._kill_the_rest()
            for host in self.hosts:
                host.tidy()
        return time.monotonic() - began

    def _goes_on(self) -> bool:
        """Tell whether a host runs, or is still to start (none is after a failure)."""
        failed = any(host.process and host.process.returncode for host in self.hosts)
        comes = not failed and any(event.act == LATE for event in self.events)
        return comes or any(host.runs for host in self.hosts)

    def _do(self, event: Event) -> None:
        named = [host for host in self.hosts if event.host in ("", host.name)]
        running = [host for host in named if host.runs]
        names = ", ".join(host.name for host in running)
        if event.act == LATE:
            named[0].start(self.words)
            self.output.follow(named[0].number, named[0].folder)
            if event.at:
                self.output.say(f"starting {event.host} ({event.typed}).")
        elif event.act == KILL and running:
            self.output.say(f"killing {names} ({event.typed}).")
            for host in running:
                host.kill()
        elif running:
            self.output.say(f"sending SIGTERM to {names} ({event.typed}).")
            self._stop(running, everybody=not event.host)

    def _on_signals(self) -> None:
        for arrived in self.signals.take():
            if arrived == signal.SIGCHLD:
                self._reap()
                continue
            self.output.hurry()
            if self._are_all_stopped:
                self.output.say(f"{signal_name(arrived)} after a stop: killing the job.")
                for host in self.hosts:
                    host.kill()
            else:
                self.output.say(
                    f"{signal_name(arrived)}: stopping the job as SageMaker would, with SIGTERM "
                    "to every host; a second one kills it."
                )
                self._stop(self.hosts, everybody=True)

    def _stop(self, hosts: Sequence[Host], *, everybody: bool) -> None:
        self.was_stopped = True
        if everybody:
            self._are_all_stopped = True
            self.events = [event for event in self.events if event.act != LATE]
        for host in hosts:
            host.stop()

    def _reap(self) -> None:
        """Note which hosts' launchers have ended; adopted children are reaped, too."""
        processes.reap(*(host.process for host in self.hosts if host.process))

    def _kill_the_rest(self) -> None:
        """Kill processes that have lost their launcher, or all after an error of our own."""
        deadline = time.monotonic() + _TO_DIE
        self._reap()
        while self._below() and time.monotonic() < deadline:
            _kill_all(self._below)
            time.sleep(0.02)
            self._reap()

    def _below(self) -> list[int]:
        """Return all processes below this one."""
        return tree(processes.children() - self._others)
