"""The machine below a simulated launcher: the System on which the production loop runs.

It has the clock, a selector with byte connections, and the table of processes; no more is simulated
of a launcher.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import selectors
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import Disposition, LaunchError, NotFoundError
from simulation.plan import What

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.machine import Machine
    from simulation.nursery import Line

_REACHES = (0.0005, 0.01)  # seconds that a connection takes, where it comes to be
_ANSWERS = (0.02, 2.0)  # seconds that the driver of the GPUs takes, if it does not hang
_REPORT = """GPU 00000000:53:00.0
    GPU UUID            : GPU-5a
    GPU Recovery Action : {}
"""
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

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        """Return that the other end answers."""
        return bytes(size)

    def getsockname(self) -> tuple[str, int]:
        """Return no address: no interface has to be found for it."""
        return "", 0

    def getpeername(self) -> tuple[str, int]:
        """Return where the other end is."""
        return "10.0.0.1", 0


class Question:
    """What the driver of a host's GPUs is asked; it answers with what it knows now, or never."""

    def __init__(self, system: System, then: Callable[[str], None]) -> None:
        job, machine = system.job, system.machine
        report = _REPORT.format("Reset" if machine.gpu_is_broken else "None")
        self._selector = system.selector
        self._answer: Ended | None = Ended(lambda: (self.close(), then(report)))
        system.selector.register(self._answer, selectors.EVENT_READ, self._answer.act)
        if not job.of(machine, What.DRIVER_HANGS):
            job.clock.after(job.random.uniform(*_ANSWERS), self._answer.ends)

    def close(self) -> None:
        """Give it up."""
        if self._answer:
            self._selector.unregister(self._answer)
            self._answer = None


class System:
    """The System of one simulated launcher (launcher/host/system.py has the real one)."""

    def __init__(self, job: Job, machine: Machine, wake: Callable[[], None]) -> None:
        self.job, self.machine = job, machine
        self.selector = Selector(wake)
        self.signals = Signals()
        self._folders = 0
        self._locals: dict[str, Listener] = {}  # for ranks and torchrun, by folder
        self._last: Listener | None = None
        self._reapable: list[tuple[int, int]] = []

    def now(self) -> float:
        """Return the time."""
        return self.job.clock.now

    def log(self, line: str) -> None:
        """Write a line of the trace."""
        self.job.watch.note(f"log: {line}", self.machine.name)

    # The network.

    def make_room(self, wanted: int) -> tuple[int, int]:
        """Return how many files there can be open, and are."""
        few = self.job.of(self.machine, What.TOO_FEW_FILES)
        return (8 if few else wanted + 8), 8

    def listen(self, host: str, port: int) -> tuple[list[Any], bool]:
        """Listen for the other hosts."""
        if self.now() < self.job.network.taken_until:
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

    # Ranks and torchrun.

    @contextlib.contextmanager
    def folder(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Return the name of a folder: of an attempt, or of what a nursery executes."""
        self._folders += 1
        cannot = self.job.of(self.machine, What.NO_FOLDER)
        if cannot and self._folders == cannot.amount:
            self.job.watch.fault(cannot, self.machine)
            raise LaunchError("cannot create a folder in /tmp (read-only); set TMPDIR.")
        yield f"/job-{self._folders}"

    def listen_in(self, folder: str) -> Any:
        """Listen for ranks and torchrun."""
        listener = Listener(lambda: listener.refuse())
        self._locals[folder] = self._last = listener
        return listener

    def listener(self, folder: str) -> Listener | None:
        """Return where those of a folder connect, "": of the last; None if nothing listens."""
        listener = self._locals.get(folder) if folder else self._last
        return listener if listener and listener.is_open else None

    def disconnect(self) -> None:
        """This launcher was killed: the kernel closes what it has open."""
        for listener in self._locals.values():
            for end in listener.ends:
                end.close()

    def oom_kills(self) -> dict[str, int]:
        """Return that none was counted."""
        return {}

    def crash(self, folder: str, pid: int) -> str:
        """Return that a rank has written nothing."""
        return ""

    def time_of_day(self) -> str:
        """Return the same time, for runs that are repeated."""
        return "12:34:56 UTC"

    # Processes.

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        mark: Any,
        *,
        tied: bool,
        folder: str = "",
    ) -> int:
        """Start torchrun, or what runs it."""
        child = self.job.start_torchrun(self.machine, environ)
        if child is None:
            raise NotFoundError("cannot execute python: no such file.")
        return child.pid

    def start_helper(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        mark: Any,
        folder: str,
        take: Callable[[Mapping[str, Any] | None], None],
    ) -> Line:
        """Start what forks torchruns and ranks."""
        return self.job.start_nursery(self.machine, take)

    def limit_files(self, pid: int) -> None:
        """Nothing: there are enough."""

    def child_ended(self, pid: int, exit_code: int) -> None:
        """A child has ended, or a process whose parent has."""
        self._reapable.append((pid, exit_code))
        self.signals.add(signal.SIGCHLD)

    def reap(self) -> list[tuple[int, int]]:
        """Return the children that have ended."""
        ended, self._reapable = self._reapable, []
        for pid, _ in ended:
            self.job.processes[pid].reaped_at = self.now()
        return ended

    def add_leader(self, pid: int) -> None:
        """Nothing: all processes of a machine are the job's."""

    def exit_state(self, pid: int) -> tuple[bool, int | None]:
        """Return whether a process has ended, and how."""
        process = self.job.processes[pid]
        return (False, 0) if process.exit_code is None else (True, process.exit_code)

    def state_of(self, pid: int) -> str:
        """Return the letter of a process, as in proc(5), until it is reaped."""
        process = self.job.processes[pid]
        if not process.runs:
            return "Z" if math.isinf(process.reaped_at) else ""
        return "D" if process.is_held else "S"

    def send(self, pid: int, number: int) -> None:
        """Send a process a signal."""
        self._is_known(pid, number)
        self.send_leftover(pid, number)

    def send_leftover(self, pid: int, number: int) -> None:
        """Send a process a signal that was looked at before: a pid that is another's gets none."""
        process = self.machine.processes.get(pid)
        if process:
            process.signal(number)

    def _is_known(self, pid: int, number: int) -> None:
        if self.job.processes[pid].reaped_at < math.inf:
            self.job.watch.signals_reaped(self.machine, pid, number)

    def send_group(self, leader: int, number: int) -> None:
        """Send a group a signal."""
        self._is_known(leader, number)
        for process in list(self.machine.processes.values()):
            if process.session == leader:
                process.signal(number)

    def send_rest_of_group(self, leader: int, number: int) -> None:
        """Send what a rank has started in its group a signal."""
        for process in list(self.machine.processes.values()):
            if process.session == leader != process.pid:
                process.signal(number)

    def response(self, pid: int, number: int) -> Disposition:
        """Return what a rank does at a signal."""
        process = self.machine.processes.get(pid)
        return process.response(number) if process else Disposition.DEFAULT

    def leftovers(self, child: int) -> list[int]:
        """Return what is neither a child nor below it."""
        top = self.job.processes.get(child)
        return [
            process.pid
            for process in self.machine.processes.values()
            if not (process.is_spared or (top and top.runs and process.is_below(top)))
        ]

    def ask(
        self, argv: Sequence[str], environ: Mapping[str, str], then: Callable[[str], None]
    ) -> Question:
        """Ask the driver of this host's GPUs."""
        return Question(self, then)

    def end_all(self, pids: Sequence[int], seconds: float) -> None:
        """Kill all processes of the job."""
        for pid in pids:
            self._is_known(pid, signal.SIGTERM)
        for process in list(self.machine.processes.values()):
            if not process.is_spared:
                process.signal(signal.SIGKILL)


TIMED_OUT = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
