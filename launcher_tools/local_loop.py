"""The loop of all hosts: what is due, stops, and their ends. It never waits for a reader."""

from __future__ import annotations

import select
import signal
import subprocess
import time
from collections.abc import Sequence

from launcher.processes import Processes, reap
from launcher.signals import Signals
from launcher.text import signal_name
from launcher_tools import local_schedule
from launcher_tools.local_host import Host, kill_all
from launcher_tools.local_printer import Printer
from launcher_tools.local_schedule import Event, What

_TO_WRITE = 2  # seconds
_TO_DIE = 10  # seconds that a process may take to die of SIGKILL


class Loop:
    """Runs the hosts to their ends. `was_stopped`: one or all of them were told to stop.

    `mark` is a variable of their environment, and its value, that no other job has.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        events: Sequence[Event],
        words: Sequence[str],
        signals: Signals,
        printer: Printer,
        mark: tuple[str, str],
    ) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._events = tuple(events)
        self._words = words
        self._signals = signals
        self._printer = printer
        self._mark = mark
        self._stopped = False  # all of it
        self.was_stopped = False

    def run(self) -> float:
        """Return the seconds that it took. Raises LaunchError if a launcher cannot be started."""
        below = Processes(self._mark)  # what a killed launcher leaves behind becomes our child
        began = time.monotonic()
        try:
            while self._goes_on():
                now, self._events = local_schedule.due(self._events, time.monotonic() - began)
                for event in now:
                    self._do(event)
                self._wait(began)
                self._on_signals()
        finally:
            self._kill_the_rest(below)
            self._wait_for_logs()
            for host in self._hosts.values():
                host.tidy()
        return time.monotonic() - began

    def _goes_on(self) -> bool:
        """Tell whether a host runs, or one is to start: not after a stop or a failure."""
        hosts = self._hosts.values()
        if any(host.runs for host in hosts):
            return True
        failed = any(host.process and host.process.returncode for host in hosts)
        starts = any(event.what is What.START for event in self._events)
        return starts and not failed and not self._stopped

    def _wait(self, began: float) -> None:
        timeout = None
        if self._events:
            timeout = max(0.0, began + self._events[0].at - time.monotonic())
        select.select([self._signals], [], [], timeout)

    def _do(self, event: Event) -> None:
        named = [self._hosts[event.host]] if event.host else list(self._hosts.values())
        if event.what is What.START:
            if not self._stopped:
                named[0].start(self._words)
                self._printer.follow(named[0])
                if event.at:
                    self._printer.say(f"{event.host} starts (--late {event.typed}).")
            return
        there = [host for host in named if host.runs]
        if not there:
            return
        names = ", ".join(host.name for host in there)
        option = f"--{event.what.value} {event.typed}"
        if event.what is What.KILL:
            self._printer.say(f"{names} is killed ({option}).")
            for host in there:
                host.kill()
        else:
            self._printer.say(f"SIGTERM to {names} ({option}).")
            self._stop(there, everybody=not event.host)

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                reap(*self._processes())
                continue
            self._printer.hurry()
            if self._stopped:
                self._printer.say(f"{signal_name(number)} after a stop: the job is killed.")
                for host in self._hosts.values():
                    host.kill()
            else:
                running = [host for host in self._hosts.values() if host.runs]
                self._printer.say(
                    f"{signal_name(number)}: the job is stopped as SageMaker does it, "
                    "with SIGTERM to every host; once more kills it."
                )
                self._stop(running, everybody=True)

    def _stop(self, hosts: Sequence[Host], *, everybody: bool) -> None:
        self._stopped = self._stopped or everybody
        self.was_stopped = True
        for host in hosts:
            host.stop()

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        hosts = self._hosts.values()
        return [
            *(host.process for host in hosts if host.process),
            *(drain for host in hosts for drain in host.drains),
        ]

    def _wait_for_logs(self) -> None:
        """Wait until the logs hold all; not long for what is not the job's, and still writes."""
        deadline = time.monotonic() + _TO_WRITE
        while reap(*self._processes()) and time.monotonic() < deadline:
            if all(process.returncode is not None for process in self._processes()):
                return
            time.sleep(0.005)

    def _kill_the_rest(self, below: Processes) -> None:
        """Kill what runs without its launcher, or because of an error of our own."""
        deadline = time.monotonic() + _TO_DIE
        while reap(*self._processes()) and below.all() and time.monotonic() < deadline:
            kill_all(below.all)
            time.sleep(0.02)
