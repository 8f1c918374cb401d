"""One simulated host: its processes and who hears of them."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.keeper import Keeper
    from simulation.launcher import Launcher
    from simulation.store import Stores
    from simulation.torchrun import Runner, Torchrun


class Machine:
    """A host, or its container.

    Attributes: `is_up`; `is_cut` off the network; `delay`, seconds that its messages take;
    `launcher`, once it is started; `torchrun`, and the `runner` of that, if there is one; `keepers`
    that were started; `store`, which makes those of ranks.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        self.name = job.names[number]
        self.has_started = False  # its name resolves
        self.is_up = True
        self.is_cut = False
        self.delay = 0.0
        self.launcher: Launcher | None = None
        self.torchrun: Torchrun | None = None
        self.runner: Runner | None = None
        self.keepers: list[Keeper] = []
        self.store: Stores | None = None
        self.processes: dict[int, Process] = {}  # those that run, in the order of their start

    def reaches(self, other: Machine) -> bool:
        """Tell whether packets get from one to the other."""
        both_up = self.is_up and other.is_up
        return both_up and (self is other or not (self.is_cut or other.is_cut))

    def die(self, *, told: bool) -> None:
        """End everything at once; the kernel tells other hosts, or is gone as well."""
        self.is_up = told
        if self.launcher:
            self.launcher.die(told=told)
        for process in list(self.processes.values()):
            process.held_until = -math.inf
            process.end(-signal.SIGKILL)


class Process:
    """A process of the job; the kernel gives those whose parent has ended to who adopts them.

    Attributes: `heard`, the signals that it was sent, with times; `exit_code`, None while it runs;
    `held_until`, until when the kernel holds it; `is_tied`: the kernel stops it if its parent is
    killed (PR_SET_PDEATHSIG); `adopts`: it is a subreaper, as the launcher is; `attempt`, of which
    it is, 0 if of none.
    """

    is_tied = adopts = False

    def __init__(self, machine: Machine, parent: Process | None, attempt: int = 0) -> None:
        self.machine = machine
        self.job = machine.job
        self.clock = machine.job.clock
        self.parent = parent
        self.attempt = attempt
        self.held_until = self._held_from = -math.inf
        self.pid = 100 + len(machine.job.processes)
        self.heard: list[tuple[float, int]] = []
        self.exit_code: int | None = None
        self.started = self.clock.now
        self.ended = math.inf
        machine.processes[self.pid] = self
        machine.job.processes[self.pid] = self

    def soon(self, within: tuple[float, float], act: Callable[..., None], *arguments: Any) -> None:
        """Do something in a while, if it runs then."""
        seconds = self.job.random.uniform(*within)
        self.clock.after(seconds, lambda: act(*arguments) if self.runs else None)

    @property
    def runs(self) -> bool:
        return self.exit_code is None

    @property
    def is_held(self) -> bool:
        return self.clock.now < self.held_until

    @property
    def killed_at(self) -> float:
        """When it was sent SIGKILL first."""
        return next((at for at, number in self.heard if number == signal.SIGKILL), math.inf)

    def hold(self, seconds: float) -> None:
        """Be held by the kernel for some seconds, or for ever (0)."""
        self._held_from = self.clock.now
        self.held_until = self.clock.now + (seconds or math.inf)
        if seconds:
            self.clock.at(self.held_until, self._comes_free)

    def waits_for_kernel(self, act: Callable[..., None], *arguments: Any) -> bool:
        """Tell whether the kernel holds it; have something done when it does not any more."""
        if self.is_held and self.held_until < math.inf:
            self.clock.at(self.held_until, act, *arguments)
        return self.is_held

    def _comes_free(self) -> None:
        """Take the signals that have come meanwhile."""
        came = [number for at, number in self.heard if at >= self._held_from]
        for number in sorted(came, key=lambda number: number != signal.SIGKILL):
            self._take(number)

    @property
    def above(self) -> Process | None:
        """Whose child it is now; None: the launcher's."""
        above = self.parent
        while above and not (above.runs and (above is self.parent or above.adopts)):
            above = above.parent
        return above

    def below(self) -> list[Process]:
        """Return all processes below it, each behind its parent."""
        found: list[Process] = [self]
        for process in self.machine.processes.values():
            if process.above in found:
                found.append(process)
        return found[1:]

    def signal(self, number: int) -> None:
        """Take a signal."""
        if self.runs:
            self.heard.append((self.clock.now, number))
            if not self.is_held:
                self._take(number)

    def _take(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.end(-number)
        elif self.runs:
            self.on_signal(number)

    def on_signal(self, number: int) -> None:
        """Do what the process does at a signal that it can handle."""
        self.end(-number)

    def end(self, exit_code: int) -> None:
        """End, and have its parent notice; the kernel signals the children that are tied to it."""
        if not self.runs or self.waits_for_kernel(self.end, exit_code):
            return
        above = self.above
        self.exit_code, self.ended = exit_code, self.clock.now
        del self.machine.processes[self.pid]
        for process in list(self.machine.processes.values()):
            if process.parent is self and process.is_tied:
                process.signal(signal.SIGTERM)
        self.on_end()
        launcher = self.machine.launcher
        if above:
            above.child_ended(self)
        elif launcher and launcher.runs:
            launcher.system.child_ended(self.pid, exit_code)

    def child_ended(self, child: Process) -> None:
        """Have a child that has ended, perhaps an adopted one."""

    def on_end(self) -> None:
        """Have others notice."""
