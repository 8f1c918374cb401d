"""What a launcher's loop runs on: a clock, a selector and its connections, processes.

The supervisor, the channel and the keepers' connections wait, start and signal only through it.
tests/simulation runs the same loop on another System. This one needs Linux (proc, prctl).
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
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

from launcher.errors import LaunchError
from launcher.host import processes
from launcher.host.cgroups import oom_kills, refused_processes
from launcher.host.child import Helper
from launcher.host.folders import files_below
from launcher.host.network import connected, listen
from launcher.host.run_dir import SOCKET, run_dir
from launcher.host.signals import Signals
from launcher.text.log import log

_MANY_FILES, _FEW_FILES = 1 << 16, 1 << 12  # that ranks may have open; a limit below few is logged
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # of a scheduler
_KILL_SECONDS = 1.0  # for killed processes to end
_LAST_FILES = 8  # descriptors that a job's end needs: /proc, folders to remove, imports


def _raise_file_limit() -> None:
    """Let this process, and all processes that it starts, have more files open.

    Data loaders pass each tensor as a file: torch's "Too many open files".
    """
    soft, hard = _file_limits()
    files = min(hard, _MANY_FILES)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        if soft < _FEW_FILES:
            log(f"each rank may have {files} files open, and not {soft} (ulimit -n).")


def _file_limits() -> tuple[int, int]:
    """Return the soft and the hard limit on open files: of a process, which Linux always has."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


class System:
    """This machine. Use it as a context manager: it closes what it has opened.

    Functions of other modules that a simulation replaces are named here first.
    """

    log = staticmethod(log)
    listen = staticmethod(listen)
    folder = staticmethod(run_dir)
    files_below = staticmethod(files_below)
    oom_kills = staticmethod(oom_kills)
    refused_processes = staticmethod(refused_processes)
    kill_tree = staticmethod(processes.kill_tree)
    reap = staticmethod(processes.reaped)
    state_of = staticmethod(processes.state_of)
    cpu_of = staticmethod(processes.cpu_of)

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

    def __init__(self, signals: Signals) -> None:
        self._stood_still = 0.0
        self.signals = signals
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        _raise_file_limit()
        self._over = threading.Event()
        self._news: deque[Callable[[], None]] = deque()  # from threads, which ring the bell
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self.selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._helpers: set[int] = set()
        self._others = processes.children()  # from before this launcher

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.selector.close()
        for end in (self._bell, self._button):
            end.close()

    # The network. Sockets do not block.

    def open_files(self) -> tuple[int, int]:
        """Return how many files this process may have open, and how many it has."""
        return _file_limits()[0], len(os.listdir("/proc/self/fd")) - 1  # 1: for the listing itself

    def has_room_beside(self, connection: socket.socket) -> bool:
        """Whether a new connection leaves the descriptors that the end of a job needs."""
        return connection.fileno() < _file_limits()[0] - _LAST_FILES

    def connect(
        self, host: str, port: int, wait: float, then: Callable[[socket.socket | str], None]
    ) -> None:
        """After `wait` seconds, connect, and call then(socket, or why there is none).

        In a thread: a look-up may take long. Raises LaunchError if no thread can be started.
        """

        def run() -> None:
            if self._over.wait(wait):
                return
            what = connected(host, port)
            if not self._over.is_set():
                self._news.append(functools.partial(then, what))
                with contextlib.suppress(OSError):  # it is full of rings, or closed
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
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(os.path.join(folder, SOCKET))
        except OSError as error:
            fix = "raise ulimit -n" if error.errno in (errno.EMFILE, errno.ENFILE) else "set TMPDIR"
            raise LaunchError(f"cannot create a socket in {folder}: {error}; {fix}.") from None
        listener.setblocking(False)
        listener.listen(128)
        return listener

    def send_with_stderr(self, connection: socket.socket, line: bytes) -> None:
        """Send a keeper a line, together with this process's stderr. Raises OSError."""
        socket.send_fds(connection, [line], [2])

    # Processes.

    def start(
        self, argv: Sequence[str], environ: Mapping[str, str], *, folder: str, stderr: int
    ) -> int:
        """Start torchrun, or the program that runs it, in a session of its own; return its pid.

        `folder` is its current folder, "" for this process's. The kernel sends it SIGTERM if this
        process is killed. Raises LaunchError.
        """
        processes.adopt_orphans()
        with self._as_children_are():
            child = processes.start(
                argv,
                environ,
                cwd=folder or None,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=processes.tie_to_this_process(),
            )
        child.returncode = 0  # Popen must not wait for it: reap() does
        return child.pid

    @contextlib.contextmanager
    def _as_children_are(self) -> Iterator[None]:
        """Start processes that ignore a scheduler's warnings, which would kill torchrun.

        Keepers restore their scripts' own dispositions.
        """
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _WARNINGS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def start_helper(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        take: Callable[[Mapping[str, Any] | None], None],
    ) -> Helper:
        """Start one of the job's helpers (child.py). Raises OSError or SubprocessError."""
        with self._as_children_are():
            helper = Helper(argv, environ, folder, self.selector, take)
        self._helpers.add(helper.pid)
        return helper

    @property
    def has_children(self) -> bool:
        """Whether any process of the job remains, except helpers.

        An entry point may have started processes before it executed the launcher.
        """
        return bool(self._children())

    def kill_children(self) -> None:
        """Kill all processes of the job, except helpers, and wait a moment for their end."""
        deadline = time.monotonic() + _KILL_SECONDS
        while (pids := self._children()) and time.monotonic() < deadline:
            for pid in pids:
                processes.kill_tree(pid, below=True)
            time.sleep(0.01)
            processes.reaped()

    def _children(self) -> set[int]:
        return processes.children() - self._helpers - self._others

    @property
    def ignored(self) -> list[int]:
        """The warnings of a scheduler that this process ignored at its start."""
        return [number for number in _WARNINGS if signal.getsignal(number) == signal.SIG_IGN]
