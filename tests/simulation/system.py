"""The machine below a simulated launcher: the System on which the production loop runs.

It has the clock, a selector with byte connections, and the table of processes; no more is simulated
of a launcher.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import selectors
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import LaunchError
from simulation.plan import What

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.machine import Machine
    from simulation.store import RankStore

_REACHES = (0.0005, 0.01)  # seconds that a connection takes, where it comes to be
_NO_ANSWER = 4.0  # seconds, until one that does not is given up


class Ready:
    """Something that a selector can wait for."""

    selector: Selector | None = None

    def is_ready(self) -> bool:
        """Tell whether there is something to be read."""
        raise NotImplementedError

    def wake(self) -> None:
        """Have the launcher see that this is ready."""
        if self.selector:
            self.selector.wakes(self)


class Selector:
    """What one launcher waits for; `wake` is called when something is ready."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._data: dict[Any, Any] = {}
        self._map: dict[int, Any] = {}  # by descriptor, of which each is used once
        self._descriptors = itertools.count()
        self._ready: dict[Any, None] = {}

    def register(self, what: Any, events: int, data: Any) -> None:
        """Wait for something; the launcher's own objects hold ours in `_socket`."""
        ours = getattr(what, "_socket", what)
        key = selectors.SelectorKey(what, next(self._descriptors), events, data)
        self._data[ours] = self._map[key.fd] = key
        ours.selector = self
        if ours.is_ready():
            self.wakes(ours)

    def unregister(self, what: Any) -> None:
        """Wait for it no longer."""
        ours = getattr(what, "_socket", what)
        del self._map[self._data.pop(ours).fd]
        ours.selector = None
        self._ready.pop(ours, None)

    def get_map(self) -> dict[int, Any]:
        """Return what is waited for."""
        return self._map

    def wakes(self, what: Any) -> None:
        """Something is ready."""
        self._ready[what] = None
        self._wake()

    def ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now."""
        found = [what for what in self._ready if what in self._data and what.is_ready()]
        self._ready = dict.fromkeys(found)
        return [(self._data[what], selectors.EVENT_READ) for what in found]


class Signals(Ready):
    """The signals that a launcher was sent."""

    def __init__(self) -> None:
        self._seen = b""

    def is_ready(self) -> bool:
        return bool(self._seen)

    def add(self, number: int) -> None:
        """Be sent a signal."""
        self._seen += bytes([number])
        self.wake()

    def take(self) -> bytes:
        """Return the numbers of the signals that came since the last call."""
        seen, self._seen = self._seen, b""
        return seen


class Ended(Ready):
    """A process that is watched, as a pidfd is."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.has_ended = False

    def is_ready(self) -> bool:
        return self.has_ended

    def ends(self) -> None:
        """The process has ended."""
        self.has_ended = True
        self.wake()


class Listener(Ready):
    """A socket that listens; `backlog` is what has not been accepted, `ends` all that has come."""

    def __init__(self, close: Callable[[], None] = lambda: None) -> None:
        self.backlog: deque[Any] = deque()
        self.ends: list[Any] = []
        self.is_open = True
        self._close = close

    def is_ready(self) -> bool:
        return bool(self.backlog)

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def add(self, end: Any) -> None:
        """Somebody connects."""
        self.backlog.append(end)
        self.ends.append(end)
        self.wake()

    def accept(self) -> tuple[Any, str]:
        """Return a connection that has come."""
        if not self.backlog:
            raise BlockingIOError
        return self.backlog.popleft(), ""

    def close(self) -> None:
        """Listen no longer."""
        self.is_open = False
        self._close()

    def refuse(self) -> None:
        """Hang up on those who have not been accepted."""
        while self.backlog:
            self.backlog.popleft().close()


class End(Ready):
    """The launcher's end of a connection; `hears(data)` is called with what it sends."""

    def __init__(self, hears: Callable[[bytes], None], closes: Callable[[], None]) -> None:
        self._hears, self._closes = hears, closes
        self._data = b""
        self._at_end: OSError | None | bool = False  # True: the other end has closed it

    def is_ready(self) -> bool:
        return bool(self._data or self._at_end)

    def comes(self, data: bytes) -> None:
        """Data has come."""
        self._data += data
        self.wake()

    def loses(self, why: OSError | bool = True) -> None:
        """The other end is gone."""
        self._at_end = self._at_end or why
        self.wake()

    def recv(self, size: int) -> bytes:
        """Read what has come."""
        data, self._data = self._data[:size], self._data[size:]
        if data:
            return data
        if isinstance(self._at_end, OSError):
            raise self._at_end
        if self._at_end:
            return b""
        raise BlockingIOError

    def send(self, data: bytes) -> int:
        """Send data."""
        if self._at_end is not True:
            self._hears(data)
        return len(data)

    def shutdown(self, how: int) -> None:
        """End both directions."""
        self.loses()

    def close(self) -> None:
        """Close it."""
        self._closes()

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def setsockopt(self, *_: Any) -> None:
        """Nothing: how TCP gives up is the network's."""

    def getsockname(self) -> tuple[str, int]:
        """Return no address: no interface has to be found for it."""
        return "", 0

    def getpeername(self) -> tuple[str, int]:
        """Return where the other end is."""
        return "10.0.0.1", 0


class System:
    """The System of one simulated launcher (launcher/host/system.py has the real one)."""

    ignored: Sequence[int] = ()

    def __init__(self, job: Job, machine: Machine, wake: Callable[[], None]) -> None:
        self.job, self.machine = job, machine
        self.selector = Selector(wake)
        self.signals = Signals()
        self.listener: Listener | None = None  # for keepers
        self._reapable: list[tuple[int, int]] = []
        self._stood_still = 0.0

    def now(self) -> float:
        """Return the time, without that in which the launcher stood still."""
        return self.job.clock.now - self._stood_still

    def stood_still(self, seconds: float) -> None:
        """Have no time pass for so long: the loop was late."""
        self._stood_still += seconds

    def log(self, line: str) -> None:
        """Write a line of the trace."""
        self.job.watch.note(f"log: {line}", self.machine.name)

    # The network.

    def files_below(self, folders: Sequence[str], age: float | None = None) -> int:
        """Return that it is not known what lies there."""
        return -1

    def open_files(self) -> tuple[int, int]:
        """Return how many files there can be open, and are."""
        return (8 if self.job.of(self.machine, What.TOO_FEW_FILES) else 1 << 16), 8

    def has_room_beside(self, connection: Any) -> bool:
        """Whether descriptors are left."""
        return True

    def listen(self, host: str, port: int) -> tuple[list[Any], bool]:
        """Listen for the other hosts."""
        if self.job.clock.now < self.job.network.taken_until:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return [self.job.network.listen()], True

    def connect(self, host: str, port: int, wait: float, then: Callable[[Any], None]) -> None:
        """Connect to the coordinator after a wait."""
        self.job.clock.after(wait, self._connect, then)

    def _connect(self, then: Callable[[Any], None]) -> None:
        launcher = self.machine.launcher
        if not launcher or not launcher.runs:
            return
        found = self.job.network.connect(self.machine, self.job.random)
        seconds = self.job.random.uniform(*_REACHES)
        if found == "it does not answer":
            seconds = _NO_ANSWER
        call = Ended(lambda: (self.selector.unregister(call), then(found)))
        self.selector.register(call, selectors.EVENT_READ, call.act)
        self.job.clock.after(seconds, call.ends)

    def raises(self) -> None:
        """Have what the launcher does next raise an error that nobody expects."""

        def act() -> None:
            self.selector.unregister(one)
            raise RuntimeError("a mistake")

        one = Ended(act)
        self.selector.register(one, selectors.EVENT_READ, act)
        one.ends()

    # Keepers.

    @contextlib.contextmanager
    def folder(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Return the name of a folder for the job."""
        cannot = self.job.of(self.machine, What.NO_FOLDER)
        if cannot:
            self.job.watch.fault(cannot, self.machine)
            raise LaunchError("cannot create a folder in /tmp (read-only); set TMPDIR.")
        yield "/job"

    def listen_in(self, folder: str) -> Any:
        """Listen for keepers."""
        listener = self.listener = Listener(lambda: listener.refuse())
        return listener

    def send_with_stderr(self, connection: End, line: bytes) -> None:
        """Send a keeper a line."""
        self.job.watch.commands_run(self.machine)
        connection.send(line)

    def disconnect(self) -> None:
        """This launcher was killed: the kernel closes what it has open."""
        for end in self.listener.ends if self.listener else ():
            end.close()
        if self.listener:
            self.listener.is_open = False

    def oom_kills(self) -> dict[str, int]:
        """Return that none was counted."""
        return {}

    refused_processes = oom_kills

    def time_of_day(self) -> str:
        """Return the same time, for runs that are repeated."""
        return "12:34:56 UTC"

    # Processes.

    def start_helper(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        take: Callable[[Mapping[str, Any] | None], None],
    ) -> RankStore:
        """Start what makes the ranks' stores."""
        from simulation.store import RankStore

        return RankStore(self.machine, take)

    def child_ended(self, pid: int, exit_code: int) -> None:
        """A child has ended, or a process whose parent has."""
        self._reapable.append((pid, exit_code))
        self.signals.add(signal.SIGCHLD)

    def reap(self) -> list[tuple[int, int]]:
        """Return the children that have ended."""
        ended, self._reapable = self._reapable, []
        return ended

    @property
    def has_children(self) -> bool:
        """Whether anything of the job is left, but for helpers."""
        return any(not process.is_helper for process in self.machine.processes.values())

    def kill_children(self) -> None:
        """Kill what is left of the job, but for helpers."""
        for process in list(self.machine.processes.values()):
            if not process.is_helper:
                process.signal(signal.SIGKILL)

    def cpu_of(self, pid: int) -> float:
        """Return how many seconds a process has used: all are idle."""
        return 0.0

    def state_of(self, pid: int) -> str:
        """Return the letter of a process, as in proc(5)."""
        process = self.job.processes[pid]
        return ("D" if process.is_held else "S") if process.runs else ""

    def kill_tree(self, pid: int, *, below: bool) -> None:
        """Kill a process, and perhaps all below it."""
        process = self.job.processes[pid]
        for one in (process, *(process.below() if below else ())):
            one.signal(signal.SIGKILL)


TIMED_OUT = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
