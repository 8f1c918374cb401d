"""The machine below a simulated launcher: the System on which the production loop runs.

It has the clock, a selector with byte connections, and the table of processes; no more is simulated
of a launcher.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import LaunchError
from launcher.text.protocol import decoded, encoded
from simulation.faults import What
from simulation.store import Stores

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.machine import Machine

_REACHES = (0.0005, 0.01)  # seconds that a connection takes, where it comes to be
_NO_ANSWER = 4.0  # seconds, until one that does not is given up
_TAKES = (0.0005, 0.003)  # seconds that a message takes on one host
TIMED_OUT = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


class Selector:
    """What one launcher waits for; `wake` is called when something is ready."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._keys: dict[Any, selectors.SelectorKey] = {}
        # By descriptor, of which each is used once.
        self._map: dict[int, selectors.SelectorKey] = {}
        self._descriptors = itertools.count()

    def register(self, what: Any, events: int, data: Any) -> None:
        """Wait for something."""
        key = selectors.SelectorKey(what, next(self._descriptors), events, data)
        self._keys[what] = self._map[key.fd] = key
        what.selector = self
        if what.came:
            self.wake()

    def unregister(self, what: Any) -> None:
        """Wait for it no longer."""
        del self._map[self._keys.pop(what).fd]
        what.selector = None

    def get_map(self) -> dict[int, Any]:
        """Return what is waited for."""
        return self._map

    def ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now."""
        return [(key, selectors.EVENT_READ) for ours, key in self._keys.items() if ours.came]


class Ready:
    """Something that a selector can wait for: it is ready while `came` holds what has come."""

    def __init__(self) -> None:
        self.selector: Selector | None = None
        self.came: list[Any] = []

    def comes(self, what: Any) -> None:
        """Something has come."""
        self.came.append(what)
        if self.selector:
            self.selector.wake()

    def take(self) -> bytes:
        """Return the numbers of the signals that came since the last call."""
        came, self.came = bytes(self.came), []
        return came

    def setblocking(self, *_: Any) -> None:
        """Nothing: it never blocks, and how TCP gives up is the network's."""

    setsockopt = setblocking


class Listener(Ready):
    """A socket that listens."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True

    def accept(self) -> tuple[Any, str]:
        """Return a connection that has come."""
        if not self.came:
            raise BlockingIOError
        return self.came.pop(0), ""

    def close(self) -> None:
        """Listen no longer; hang up on those who have not been accepted."""
        self.is_open = False
        for end in self.came:
            end.close()
        self.came = []


class End(Ready):
    """One end of a connection: what it sends arrives at its `peer`, in order, after a while."""

    peer: End

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.is_open = machine, True
        self._last = 0.0  # when what was sent last arrives

    def takes(self) -> float:
        """Return how many seconds a message is on its way."""
        return self.machine.job.random.uniform(*_TAKES)

    def _post(self, data: bytes) -> None:
        if self.is_open:
            clock = self.machine.job.clock
            self._last = max(self._last, clock.now + self.takes())
            clock.at(self._last, self._arrives, data)

    def _arrives(self, what: bytes | OSError) -> None:
        if self.peer.is_open:
            self.peer.comes(what)

    def recv(self, size: int) -> bytes:
        """Read all that has come, as TCP may give it; the end of a connection stays there."""
        first, data = self.came[0] if self.came else BlockingIOError(), b""
        if isinstance(first, OSError):
            raise first
        while self.came and isinstance(self.came[0], bytes) and self.came[0]:
            data += self.came.pop(0)
        return data

    def send(self, data: bytes) -> int:
        """Send data."""
        self._post(data)
        return len(data)

    def sendmsg(self, lines: Sequence[bytes], stderr: object) -> None:
        """Send a keeper the command to run, with the launcher's stderr."""
        self._post(*lines)

    def shutdown(self, how: int) -> None:
        """End both directions."""
        self.comes(b"")

    def close(self) -> None:
        """Close it."""
        self._post(b"")
        self.is_open = False

    def getsockname(self) -> tuple[str, int]:
        """Return no address: no interface has to be found for it."""
        return "", 0

    def getpeername(self) -> tuple[str, int]:
        """Return where the other end is."""
        return "10.0.0.1", 0


class Pipe(End):
    """The end of a connection to a host's launcher, of who is simulated and talks in messages.

    `hears` gets each of the launcher's messages, `loses` is called when its end is closed.
    """

    def __init__(
        self,
        machine: Machine,
        hears: Callable[[dict[str, Any]], None] = lambda message: None,
        loses: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(machine)
        self._hears, self._loses = hears, loses
        launcher = machine.launcher
        listener = launcher.system.listener if launcher and launcher.runs else None
        self.is_open = listener is not None and listener.is_open
        if listener and launcher and self.is_open:
            self.peer = End(machine)
            self.peer.peer = self
            launcher.system.ends.append(self.peer)
            listener.comes(self.peer)

    def say(self, message: Mapping[str, Any], before: bytes = b"") -> None:
        """Send a message, behind a mark if it is passed on."""
        self.send(before + encoded(message))

    def comes(self, what: Any) -> None:
        """Hear a message, or that the launcher's end is closed."""
        for line in what.splitlines():
            self._hears(decoded(line))
        if not what:
            self.is_open = False
            self._loses()


class System:
    """The System of one simulated launcher (launcher/host/system.py has the real one)."""

    def __init__(self, job: Job, machine: Machine, wake: Callable[[], None]) -> None:
        self.job, self.machine = job, machine
        self.selector = Selector(wake)
        self.signals = Ready()
        self.listener: Listener | None = None  # for keepers
        self.ends: list[End] = []  # of connections to keepers
        self._reapable: dict[int, int] = {}
        self._stood_still = 0.0

    def now(self) -> float:
        """Return the time, without that in which the launcher stood still."""
        return self.job.clock.now - self._stood_still

    def stood_still(self, seconds: float) -> None:
        """Have no time pass for so long: the loop was late."""
        self._stood_still += seconds

    def log(self, line: str) -> None:
        """Write a line of the trace."""
        self.job.watch.logs(self.machine, line)

    def in_loop(self, seconds: float, act: Callable[..., Any], *arguments: Any) -> None:
        """Have something done in the launcher's loop, after a while."""
        bell = Ready()
        data = lambda: (self.selector.unregister(bell), act(*arguments))  # noqa: E731
        self.selector.register(bell, selectors.EVENT_READ, data)
        self.job.clock.after(seconds, bell.comes, True)

    # The network.

    def listen(self, host: str, port: int) -> tuple[list[Any], bool]:
        """Listen for the other hosts."""
        if self.job.clock.now < self.job.network.taken_until:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return [self.job.network.listen()], True

    def connect(self, host: str, port: int, then: Callable[[Any], None]) -> None:
        """Connect to the coordinator."""
        found = self.job.network.connect(self.machine)
        seconds = self.job.random.uniform(*_REACHES)
        self.in_loop(_NO_ANSWER if found == "it does not answer" else seconds, then, found)

    # Keepers.

    def run_dir(self, environ: Mapping[str, str]) -> tuple[str, Listener]:
        """Return the name of a folder for the job, and what listens for keepers."""
        cannot = self.job.of(self.machine, What.NO_FOLDER)
        if cannot:
            self.job.watch.fault(cannot, self.machine)
            raise LaunchError("cannot create a folder in /tmp (read-only); set TMPDIR.")
        self.listener = Listener()
        return "/no/such/folder", self.listener

    def disconnect(self) -> None:
        """This launcher was killed: the kernel closes what it has open."""
        for one in (*self.ends, *filter(None, (self.listener, self.machine.store))):
            one.close()

    def oom_kills(self) -> dict[str, int]:
        """Return that none was counted."""
        return {}

    refused_processes = oom_kills

    def time_of_day(self) -> str:
        """Return the same time, for runs that are repeated."""
        return "12:34:56 UTC"

    # Processes.

    def start_helper(
        self, argv: object, environ: object, folder: object, name: str, take: Any
    ) -> Stores:
        """Start what makes the ranks' stores."""
        self.machine.store = Stores(self.machine, name, take)
        return self.machine.store

    def child_ended(self, pid: int, exit_code: int) -> None:
        """A child has ended, or a process whose parent has."""
        self._reapable[pid] = exit_code
        self.signals.comes(signal.SIGCHLD)

    def reap(self) -> dict[int, int]:
        """Return the children that have ended."""
        ended, self._reapable = self._reapable, {}
        return ended

    def children(self) -> set[int]:
        """Return the pids of what is left of the job, but for helpers."""
        return {*self.machine.processes}

    def kill_children(self) -> None:
        """Kill what is left of the job, but for helpers."""
        for process in list(self.machine.processes.values()):
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
