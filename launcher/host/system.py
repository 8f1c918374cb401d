"""What the loop of a launcher stands on: a clock, a selector and its connections, processes.

What the supervisor, the channel and the reports wait for, start and signal, they do by it; under
the System of tests/simulation the same loop runs. This one needs Linux (proc, prctl, prlimit).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from launcher.errors import LaunchError
from launcher.host import processes
from launcher.host.cgroups import oom_kills
from launcher.host.child import Helper
from launcher.host.console import Console
from launcher.host.network import connected, listen, own_addresses
from launcher.host.run_dir import SOCKET, run_dir
from launcher.host.signals import Signals
from launcher.text.log import log

_POLL_SECONDS = 0.05  # of ranks, where the loop has failed
_OPEN_FILES = resource.RLIMIT_NOFILE


class System:
    """This machine. Use it as a context manager: it closes what it has opened.

    What other modules have as functions, and a simulation in another way, is named here first.
    """

    now = staticmethod(time.monotonic)
    log = staticmethod(log)
    folder = staticmethod(run_dir)
    oom_kills = staticmethod(oom_kills)
    send = staticmethod(processes.send)
    reap = staticmethod(processes.reaped)
    response = staticmethod(processes.response)
    exit_state = staticmethod(processes.exit_state)
    state_of = staticmethod(processes.state_of)

    @staticmethod
    def time_of_day() -> str:
        """Return the time of day, for people: 12:34:56 UTC."""
        return time.strftime("%H:%M:%S UTC", time.gmtime())

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._files = resource.getrlimit(_OPEN_FILES)  # what children get
        self._over = threading.Event()
        self._news: deque[Callable[[], None]] = deque()  # of threads; the bell rings for them
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self.selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._processes: processes.Processes | None = None
        self._leftovers: dict[int, Any] = {}  # processes that were found last, by pid

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.selector.close()
        for end in (self._bell, self._button):
            end.close()

    # The network. Sockets do not block.

    def make_room(self, wanted: int) -> tuple[int, int]:
        """Raise the limit on open files if need be; return how many there can be, and are."""
        used = len(os.listdir("/proc/self/fd")) - 1  # 1: of the listing itself
        soft, hard = (wanted + used if n == resource.RLIM_INFINITY else n for n in self._files)
        files = min(wanted + used, hard)
        if files > soft:
            resource.setrlimit(_OPEN_FILES, (files, self._files[1]))
        return max(files, soft), used

    def listen(self, host: str, port: int) -> tuple[list[socket.socket], bool]:
        """Listen on the addresses of this host's name; if it has none such, on all of its own.

        Return the sockets, and whether others may find this host by its name. Raises OSError:
        EADDRINUSE if the port is taken.
        """
        own, resolves = own_addresses(host)
        try:
            return listen(own, port), resolves
        except OSError as error:
            if error.errno == errno.EADDRINUSE or not own:
                raise
        # The name resolves to a proxy's address, or to an outdated one.
        return listen([], port), False

    def connect(
        self, host: str, port: int, wait: float, then: Callable[[socket.socket | str], None]
    ) -> None:
        """Connect after `wait` seconds; then(socket, or what the trouble is).

        In a thread: a look-up may take long. Raises LaunchError if none can be started.
        """

        def run() -> None:
            if self._over.wait(wait):
                return
            what = connected(host, port)
            if not self._over.is_set():
                self._news.append(functools.partial(then, what))
                with contextlib.suppress(OSError):  # it has rung already, or all is over
                    self._button.send(b"\0")
            elif not isinstance(what, str):
                what.close()

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError as error:  # ulimit -u, or the cgroup's pids.max
            raise LaunchError(f"cannot start a thread ({error}); raise ulimit -u.") from None

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(1 << 12)
        while self._news:
            self._news.popleft()()

    def listen_in(self, folder: str) -> socket.socket:
        """Listen on a Unix socket in a folder. Raises LaunchError."""
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor is left
            raise LaunchError(
                f"cannot create a socket: {error.strerror}; raise ulimit -n."
            ) from None
        listener.setblocking(False)
        try:
            listener.bind(os.path.join(folder, SOCKET))
        except OSError as error:
            listener.close()
            raise LaunchError(f"cannot create a socket in {folder}: {error}; set TMPDIR.") from None
        listener.listen(128)
        return listener

    # Processes.

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        mark: tuple[str, str],
        *,
        tied: bool,
        folder: str = "",
    ) -> int:
        """Start torchrun, or what runs it, in a session of its own; return its pid.

        `mark` is a variable of its environment, which what it starts inherits; `folder` is its
        current one, "" for this process's. Raises LaunchError.
        """
        self._require_processes(mark)
        child: subprocess.Popen[bytes] = processes.start(
            argv, environ, new_session=True, tied=tied, folder=folder
        )
        child.returncode = 0  # Popen is not to wait for it: reap() does
        self.add_leader(child.pid)
        self.limit_files(child.pid)
        return child.pid

    def _require_processes(self, mark: tuple[str, str]) -> processes.Processes:
        if self._processes is None:
            self._processes = processes.Processes(mark)
        return self._processes

    def limit_files(self, pid: int) -> None:
        """Give a process the limit on open files that this one had at its start."""
        with contextlib.suppress(OSError):  # it has ended
            resource.prlimit(pid, _OPEN_FILES, self._files)

    def add_leader(self, pid: int) -> None:
        """Take the session of a process for the job's, also after it.

        Raises ValueError before anything is started: then it is nobody's whom this concerns.
        """
        if self._processes is None:
            raise ValueError(pid)
        self._processes.add(pid)

    def send_group(self, leader: int, number: int) -> None:
        """Send a signal to a process group, which may be gone."""
        with contextlib.suppress(OSError):
            os.killpg(leader, number)

    def send_rest_of_group(self, leader: int, number: int) -> None:
        """Send a signal to the other processes of the group that a rank leads, or has led."""
        assert self._processes
        for process in self._processes.of_group(leader):
            processes.send(process, number)

    def leftovers(self, child: int) -> list[int]:
        """Return the pids of the job's processes that are neither a child nor below it."""
        assert self._processes
        found = self._processes.leftovers(child)
        self._leftovers = {process.pid: process for process in found}
        return list(self._leftovers)

    def send_leftover(self, pid: int, number: int) -> None:
        """Send a signal to one of the last `leftovers`, unless its pid is another's by now."""
        if pid in self._leftovers:
            processes.send(self._leftovers[pid], number)

    def end_all(self, pids: Sequence[int], seconds: float) -> None:
        """End the ranks with SIGTERM, and after some seconds all processes of the job."""
        for pid in pids:
            processes.send(pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(processes.exit_state(pid)[0] for pid in pids):
            time.sleep(_POLL_SECONDS)
        if self._processes:
            for process in self._processes.all():
                processes.send(process, signal.SIGKILL)

    def start_helper(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        mark: tuple[str, str],
        folder: str,
        take: Callable[[Mapping[str, Any] | None], None],
    ) -> Helper:
        """Start a helper of the job's, which is no process of an attempt's (child.py).

        Raises OSError or SubprocessError.
        """
        known = self._require_processes(mark)
        helper = Helper(argv, environ, folder, self.selector, take)
        self.limit_files(helper.pid)
        known.spare(helper.pid)
        return helper

    def start_console(
        self, argv: Sequence[str], environ: Mapping[str, str], mark: tuple[str, str]
    ) -> Console | None:
        """Start what copies ranks' output to stdout, None without one; `mark` as of start().

        Raises OSError or SubprocessError.
        """
        if sys.stdout is None:  # 1 may be the number of a file of ours
            return None
        known = self._require_processes(mark)
        console = Console(argv, environ)
        known.spare(console.pid)
        return console
