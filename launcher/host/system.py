"""What the loop of a launcher stands on: a clock, a selector and its connections, processes.

The supervisor and the channel use nothing else of the machine. tests/simulation has another System,
under which the same loop runs.
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

from launcher.errors import Disposition, LaunchError
from launcher.host import processes
from launcher.host.cgroups import oom_kills
from launcher.host.child import Question
from launcher.host.names import is_literal, look_up
from launcher.host.run_dir import crash, run_dir
from launcher.host.signals import Signals
from launcher.text.log import log
from launcher.text.words import is_loopback

_TO_CONNECT = 4  # s for an address to take a connection
_OWN_NAME = 0.2  # s for a look-up of this host's own name, which seldom takes any longer
_POLL = 0.05  # s between two looks at ranks, where the loop has failed
_BACKLOG = 1 << 12  # the kernel makes it net.core.somaxconn at most (listen(2))
_LIMIT = resource.RLIMIT_NOFILE


class System:
    """This machine; `ended(pid, exit_code)` is called for each process that is watched.

    Use it as a context manager: it closes what it has opened.
    """

    now = staticmethod(time.monotonic)
    log = staticmethod(log)
    folder = staticmethod(run_dir)
    oom_kills = staticmethod(oom_kills)
    exit_state = staticmethod(processes.exit_state)
    state_of = staticmethod(processes.state_of)
    crash = staticmethod(crash)

    @staticmethod
    def time_of_day() -> str:
        """Return the time of day, for people: 12:34:56 UTC."""
        return time.strftime("%H:%M:%S UTC", time.gmtime())

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._files = resource.getrlimit(_LIMIT)  # what children get
        self._over = threading.Event()
        self._news: deque[Callable[[], None]] = deque()  # of threads; the bell rings for them
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self.selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._pidfds: set[int] = set()
        self._processes: processes.Processes | None = None
        self._found: dict[int, Any] = {}  # processes that were looked for last, by pid

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.selector.close()
        for end in (self._bell, self._button):
            end.close()
        while self._pidfds:
            os.close(self._pidfds.pop())

    # The network. Sockets do not block.

    def make_room(self, wanted: int) -> tuple[int, int]:
        """Raise the limit on open files if need be; return how many there can be, and are."""
        used = len(os.listdir("/proc/self/fd")) - 1  # 1: of the listing itself
        soft, hard = (wanted + used if n == resource.RLIM_INFINITY else n for n in self._files)
        files = min(wanted + used, hard)
        if files > soft:
            resource.setrlimit(_LIMIT, (files, self._files[1]))
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
            what = _reached(host, port)
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
            raise LaunchError(f"cannot make a socket: {error.strerror}; raise ulimit -n.") from None
        listener.setblocking(False)
        try:
            listener.bind(os.path.join(folder, "socket"))
        except OSError as error:
            listener.close()
            raise LaunchError(f"cannot make a socket in {folder}: {error}; set TMPDIR.") from None
        listener.listen(128)
        return listener

    # Processes.

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        mark: tuple[str, str],
        folder: str = "",
    ) -> int:
        """Start torchrun in a session of its own; return its pid.

        `mark` is a variable of its environment, which what it starts inherits; `folder` is its
        current one, "" for this process's. Raises LaunchError.
        """
        if self._processes is None:
            self._processes = processes.Processes(mark)
        child: subprocess.Popen[bytes] = processes.start(
            argv, environ, new_session=True, folder=folder
        )
        child.returncode = 0  # Popen is not to wait for it: reap() does
        self._processes.add(child.pid)
        with contextlib.suppress(OSError):  # it has ended
            resource.prlimit(child.pid, _LIMIT, self._files)
        return child.pid

    def reap(self) -> list[tuple[int, int]]:
        """Reap all children that have ended, adopted ones too; return their pids and exit codes."""
        return processes.reaped()[0]

    def watch(self, pid: int, ended: Callable[[int], None]) -> bool:
        """Have ended(pid) called when a process has ended; tell whether that can be.

        Raises ValueError before anything is started: then it is nobody's whom this concerns.
        """
        if self._processes is None:
            raise ValueError(pid)
        self._processes.add(pid)  # what is left in its session is the job's
        try:
            if sys.platform != "linux":
                return False
            pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # an old kernel, a sandbox that does not know it; or gone
            return False
        self._pidfds.add(pidfd)

        def act() -> None:
            self.selector.unregister(pidfd)
            self._pidfds.remove(pidfd)
            os.close(pidfd)
            ended(pid)

        self.selector.register(pidfd, selectors.EVENT_READ, act)
        return True

    def send(self, pid: int, number: int) -> None:
        """Send a signal to a process, which may be gone."""
        processes.send(pid, number)

    def send_group(self, leader: int, number: int) -> None:
        """Send a signal to a process group, which may be gone."""
        with contextlib.suppress(OSError):
            os.killpg(leader, number)

    def send_members(self, leader: int, number: int) -> None:
        """Send a signal to the other processes of the group that a rank leads, or has led."""
        assert self._processes
        for process in self._processes.of_group(leader):
            processes.send(process, number)

    def response(self, pid: int, number: int) -> Disposition:
        """Return what a process does at a signal, as far as /proc tells."""
        return processes.response(pid, number)

    def look(self, child: int) -> list[int]:
        """Return the pids of the job's processes that are neither a child nor below it."""
        assert self._processes
        left = self._processes.left_behind(child)
        self._found = {process.pid: process for process in left}
        return list(self._found)

    def send_found(self, pid: int, number: int) -> None:
        """Send a signal to a process that `look` has found, unless its pid is another's by now."""
        processes.send(self._found.get(pid, pid), number)

    def end_all(self, pids: Sequence[int], seconds: float) -> None:
        """End the ranks with SIGTERM, and after some seconds all processes of the job."""
        for pid in pids:
            processes.send(pid, signal.SIGTERM)
        by = time.monotonic() + seconds
        while time.monotonic() < by and not all(processes.exit_state(pid)[0] for pid in pids):
            time.sleep(_POLL)
        if self._processes:
            for process in self._processes.all():
                processes.send(process, signal.SIGKILL)

    def ask(
        self, argv: Sequence[str], environ: Mapping[str, str], then: Callable[[str], None]
    ) -> Question | None:
        """Ask a command something; then(what it says). None: it cannot be started."""
        try:
            return Question(argv, environ, self.selector, then)
        except (OSError, subprocess.SubprocessError):  # not there; no process, no descriptor left
            return None


def own_addresses(host: str) -> tuple[list[str], bool]:
    """Return what to listen on, [] for all addresses, and whether the host's name has an address.

    A host's own name may lead nobody else to it, as Debian's 127.0.1.1 in /etc/hosts, or have no
    address on this host alone.
    """
    if is_literal(host):
        return [host], True
    own = _look_up_within(host, _OWN_NAME)
    return [] if any(map(is_loopback, own)) else own, bool(own)


def _look_up_within(host: str, seconds: float) -> list[str]:
    """Return the addresses of a name, none if that takes longer."""
    found: list[str] = []

    def run() -> None:
        found.extend(str(address[0]) for _, address in look_up(host))

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads in this container
        return []
    thread.join(seconds)
    return list(found)


def listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on those of some addresses that this host has, or on all of its own ([]).

    Raises OSError: EADDRINUSE if the port is taken at one of them.
    """
    if not addresses:
        return [_listen_on_all(port)]
    listeners: list[socket.socket] = []
    none = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for address in addresses:
        for family, to in look_up(address, port):
            try:
                listeners.append(socket.create_server(to, family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    for listener in listeners:
                        listener.close()
                    raise
                none = error  # DNS may know an IPv6 address, and the host have none
    if not listeners:
        raise none
    return listeners


def _listen_on_all(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError:
            pass  # IPv6 may be switched off; and a port that is taken is for both
    return socket.create_server(("", port), backlog=_BACKLOG)


def _reached(host: str, port: int) -> socket.socket | str:
    """Return a connection, or why there is none."""
    why = f"the name {host} does not resolve"
    for family, address in look_up(host, port):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(_TO_CONNECT)
            connection.connect(address)
        except OSError as error:
            connection.close()
            refused = isinstance(error, ConnectionRefusedError)
            why = "nothing listens there" if refused else "it does not answer"
        else:
            return connection
    return why
