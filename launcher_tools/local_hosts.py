"""The hosts: each is a launcher in a session of its own, with its processes; and their loop.

The loop acts when events are due, handles stops, and never waits for a reader of hosts' output.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Callable

from launcher import PACKAGE
from launcher.errors import CannotExecuteError
from launcher.host import processes, run_dir
from launcher.host.processes import reap, send, tie_to_this_process, tree
from launcher.host.signals import Signals
from launcher.text.words import signal_name
from launcher_tools.local_options import KILL, START, Event
from launcher_tools.local_output import POLL_SECONDS, STDERR, STDOUT, Output

_TO_DIE = 10  # seconds for a process to die of SIGKILL
_LAUNCHER = os.path.join(PACKAGE, "__main__.py")


class Host:
    """Attributes: `number`, N of algo-N; `process`, its launcher, None until it starts.

    `logs` are the paths of its logs of stdout and stderr: no writer waits for a reader of our
    output, or needs us to live. Ranks have pipes to their keepers there, as on SageMaker.
    """

    def __init__(
        self, number: int, cpus: frozenset[int], base_dir: str, environment: Mapping[str, str]
    ) -> None:
        self.number = number
        self.name = f"algo-{number}"
        self.process: subprocess.Popen[bytes] | None = None
        self.logs = {
            STDOUT: os.path.join(base_dir, "stdout.log"),
            STDERR: os.path.join(base_dir, "stderr.log"),
        }
        self._cpus = cpus
        self._environment = environment

    @property
    def runs(self) -> bool:
        """Whether its launcher is running."""
        return self.process is not None and self.process.returncode is None

    def start(self, words: Sequence[str]) -> None:
        """Start its launcher. Raises LaunchError."""
        tie = tie_to_this_process()  # after a SIGKILL we cannot stop the job, and nobody else would

        def begin() -> None:
            tie()
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)

        try:
            with open(self.logs[STDOUT], "ab") as out, open(self.logs[STDERR], "ab") as err:
                self.process = subprocess.Popen(
                    [sys.executable, _LAUNCHER, *words],
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    # Otherwise a terminal's Ctrl-C would reach it and its ranks directly.
                    start_new_session=True,
                    preexec_fn=begin,
                )
        except OSError as error:
            raise CannotExecuteError(
                f"cannot start the launcher of {self.name}: {error.strerror}."
            ) from None

    def stop(self) -> None:
        """Stop it as SageMaker would: SIGTERM to its launcher."""
        if self.process and self.runs:
            send(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all of its processes; none of them may see another one die first."""
        if self.process and self.runs:
            _kill_all(functools.partial(tree, [self.process.pid]))

    def tidy(self) -> None:
        """Remove the folder that it left behind if it was killed."""
        if self.process and self.process.returncode and self.process.returncode < 0:
            run_dir.remove_left(self.process.pid, self._environment)


def _kill_all(find: Callable[[], Sequence[int]]) -> None:
    """Kill all processes that are found: first suspend each, so that it starts no other."""
    held: list[int] = []
    while new := [pid for pid in find() if pid not in held]:
        for pid in new:
            send(pid, signal.SIGSTOP)
        held += new
    for pid in held:
        send(pid, signal.SIGKILL)


class Loop:
    """Runs the hosts to their ends. `was_stopped`: one or all of them got a stop."""

    def __init__(
        self,
        hosts: Sequence[Host],
        events: Sequence[Event],
        words: Sequence[str],
        signals: Signals,
        output: Output,
    ) -> None:
        self._hosts = hosts
        self._events = list(events)
        self._words = words
        self._signals = signals
        self._output = output
        self._others = processes.children()  # from before this program was executed
        self._all_stopped = False
        self.was_stopped = False

    def run(self) -> float:
        """Return the seconds of a whole run. Raises LaunchError if a launcher cannot be started."""
        processes.adopt_orphans()  # orphans of a killed launcher become our children
        began = time.monotonic()
        try:
            while self._goes_on():
                while self._events and self._events[0].at <= time.monotonic() - began:
                    self._do(self._events.pop(0))
                select.select([self._signals], [], [], POLL_SECONDS)
                self._on_signals()
                self._output.read()
        finally:
            self._kill_the_rest()
            for host in self._hosts:
                host.tidy()
        return time.monotonic() - began

    def _goes_on(self) -> bool:
        """Tell whether a host runs, or is still to start (none is after a stop or a failure)."""
        if any(host.runs for host in self._hosts):
            return True
        failed = any(host.process and host.process.returncode for host in self._hosts)
        starts = any(event.act == START for event in self._events)
        return starts and not failed and not self._all_stopped

    def _do(self, event: Event) -> None:
        named = [host for host in self._hosts if event.host in ("", host.name)]
        if event.act == START:
            if not self._all_stopped:
                self._start(named[0])
                if event.at:
                    self._output.say(f"starting {event.host} (--late {event.typed}).")
            return
        there = [host for host in named if host.runs]
        if not there:
            return
        names = ", ".join(host.name for host in there)
        option = f"--{event.act} {event.typed}"
        if event.act == KILL:
            self._output.say(f"killing {names} ({option}).")
            for host in there:
                host.kill()
        else:
            self._output.say(f"sending SIGTERM to {names} ({option}).")
            self._stop(there, everybody=not event.host)

    def _start(self, host: Host) -> None:
        host.start(self._words)
        self._output.follow(host.number, host.logs)

    def _on_signals(self) -> None:
        for arrived in self._signals.take():
            if arrived == signal.SIGCHLD:
                self._reap()
                continue
            self._output.hurry()
            if self._all_stopped:
                self._output.say(f"{signal_name(arrived)} after a stop: killing the job.")
                for host in self._hosts:
                    host.kill()
            else:
                self._output.say(
                    f"{signal_name(arrived)}: stopping the job as SageMaker would, with SIGTERM "
                    "to every host; a second one kills it."
                )
                self._stop(self._hosts, everybody=True)

    def _stop(self, hosts: Sequence[Host], *, everybody: bool) -> None:
        self._all_stopped = self._all_stopped or everybody
        self.was_stopped = True
        for host in hosts:
            host.stop()

    def _reap(self) -> None:
        """Note which hosts' launchers have ended; adopted children are reaped, too."""
        reap(*(host.process for host in self._hosts if host.process))

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
