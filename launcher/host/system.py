"""What a launcher's loop runs on: a clock, a selector and its connections, processes.

The supervisor, the channel and the keepers' connections wait, start and signal only through it; but
torchrun's start is an argument of the supervisor. tests/simulation runs the same loop on another
System. This one needs Linux (proc, prctl).
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from launcher.errors import LaunchError
from launcher.host import processes
from launcher.host.cgroups import oom_kills, refused_processes
from launcher.host.child import Helper
from launcher.host.folders import run_dir
from launcher.host.network import connected, listen
from launcher.host.signals import Signals
from launcher.text import background
from launcher.text.log import log

_MANY_FILES, _FEW_FILES = 1 << 16, 1 << 12  # that ranks may have open; a limit below few is logged
_KILL_SECONDS = 1.0  # for killed processes to end


def _raise_file_limit() -> None:
    """Let this process, and all processes that it starts, have more files open.

    Data loaders pass each tensor as a file: torch's "Too many open files".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(hard, _MANY_FILES)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        if soft < _FEW_FILES:
            log(f"each rank may open {files:,} files (ulimit -n was {soft:,}).")


class System:
    """This machine.

    Functions of other modules that a simulation replaces are named here first.
    """

    log = staticmethod(log)
    listen = staticmethod(listen)
    run_dir = staticmethod(run_dir)
    oom_kills = staticmethod(oom_kills)
    refused_processes = staticmethod(refused_processes)
    kill_tree = staticmethod(processes.kill_tree)
    reap = staticmethod(processes.reap)
    state_of = staticmethod(processes.state_of)
    cpu_of = staticmethod(processes.cpu_of)

    def __init__(self, signals: Signals) -> None:
        self._stood_still = 0.0
        self.signals = signals
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        _raise_file_limit()
        self._not_ours = processes.children()  # helpers, and those from before this launcher

    # Time.

    @staticmethod
    def time_of_day() -> str:
        """Return the time of day, for people: 12:34:56 UTC."""
        return time.strftime("%H:%M:%S UTC", time.gmtime())

    def now(self) -> float:
        """Return the time in seconds, less the time for which the loop was suspended."""
        return time.monotonic() - self._stood_still

    def stood_still(self, seconds: float) -> None:
        """Take these seconds off the clock: the loop was suspended or blocked."""
        self._stood_still += seconds

    @staticmethod
    def start_thread(run: Callable[[], object]) -> threading.Thread:
        """Call a function in a thread. Raises LaunchError."""
        try:
            return background.start(run)
        except RuntimeError as error:  # ulimit -u, or the cgroup's pids.max
            raise LaunchError(f"cannot start a thread ({error}); raise ulimit -u.") from None

    # The network. Sockets do not block.

    def connect(self, host: str, port: int, then: Callable[[socket.socket | str], None]) -> None:
        """Connect, and call then(socket, or why there is none).

        In a thread, as a look-up may take long. If this container allows no more threads, the loop
        itself waits; such a job then fails on all hosts, when torchrun is started.
        """
        bell, rope = socket.socketpair()  # the loop wakes when the thread closes its end
        found: list[socket.socket | str] = []

        def run() -> None:
            with rope:
                found.append(connected(host, port))

        def rings() -> None:
            self.selector.unregister(bell)
            bell.close()
            then(found[0])

        try:
            self.start_thread(run)
        except LaunchError:
            run()
        self.selector.register(bell, selectors.EVENT_READ, rings)

    # Processes.

    def start_helper(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        name: str,
        take: Callable[[Mapping[str, Any]], None],
    ) -> Helper:
        """Start one of the job's helpers (child.py)."""
        helper = Helper(argv, environ, folder, self.selector, name, take)
        self._not_ours.add(helper.pid)
        return helper

    def children(self) -> set[int]:
        """Return the pids of this process's children that are the job's: not helpers.

        An entry point may have started processes before it executed the launcher. Their orphans
        become this process's children, too. They are in its session, unless they are daemons; no
        process of the job is.
        """
        own = str(os.getsid(0))
        others = processes.children() - self._not_ours
        return {pid for pid in others if own not in processes.stat(pid)[3:4]}

    def kill_children(self) -> None:
        """Kill all processes of the job, except helpers, and wait a moment for their end."""
        deadline = time.monotonic() + _KILL_SECONDS
        while (pids := self.children()) and time.monotonic() < deadline:
            processes.kill_tree(*pids, below=True)
            time.sleep(0.01)
            processes.reap()
