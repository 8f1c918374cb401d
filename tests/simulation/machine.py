"""One simulated host: its processes and who hears of them."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import Disposition

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.launcher import Launcher
    from simulation.nursery import Nursery
    from simulation.ranks import Rank
    from simulation.runner import Runner
    from simulation.torchrun import Torchrun


class Machine:
    """A host, or its container.

    Attributes: `is_up`; `is_cut` off the network; `gpu_is_broken`, as its driver knows; `delay`,
    seconds that its messages take; `launcher`, once it is started; `torchrun`, the last one;
    `runner`, if one runs torchrun; `nursery`, if one forks it.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        self.name = job.names[number]
        self.has_started = False  # its name resolves
        self.is_up = True
        self.is_cut = self.gpu_is_broken = False
        self.delay = 0.0
        self.launcher: Launcher | None = None
        self.torchrun: Torchrun | None = None
        self.runner: Runner | None = None
        self.nursery: Nursery | None = None
        self.attempt = 0  # the last that was started here
        self.folder = ""  # of it
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
    """A process of the job; the kernel gives those whose parent has ended to the launcher.

    Attributes: `session`, the pid of the rank that leads its session and group, or its own;
    `heard`, the signals that it was sent, with times; `exit_code`, None while it runs;
    `held_until`, until when the kernel holds it; `is_tied`: the kernel stops it if the launcher is
    killed (PR_SET_PDEATHSIG); `folder`, of the attempt that it is of; `is_spared`, it is of none.
    """

    def __init__(self, machine: Machine, parent: Process | None, *, leads: bool = True) -> None:
        self.machine = machine
        self.job = machine.job
        self.clock = machine.job.clock
        self.parent = parent
        self.attempt = machine.attempt
        self.folder = parent.folder if parent else machine.folder
        self.held_until = -math.inf
        self.pid = machine.job.next_pid()
        self.session = self.pid if leads or parent is None else parent.pid
        self.heard: list[tuple[float, int]] = []
        self.exit_code: int | None = None
        self.is_tied = self.is_spared = False
        self.reaped_at = math.inf  # by the launcher
        self.started = self.clock.now
        self.ended: float | None = None
        machine.processes[self.pid] = self
        machine.job.processes[self.pid] = self

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

    def is_below(self, other: Process | None) -> bool:
        """Tell whether it is a process or one of its descendants that are still connected to it."""
        above: Process | None = self
        while above is not None and above is not other:
            above = above.parent if above.parent is not None and above.parent.runs else None
        return above is not None

    def signal(self, number: int) -> None:
        """Take a signal."""
        if not self.runs:
            return
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
        """End, and have the parent told."""
        if not self.runs:
            return
        if self.waits_for_kernel(self.end, exit_code):
            return
        self.exit_code, self.ended = exit_code, self.clock.now
        del self.machine.processes[self.pid]
        self.on_end()
        launcher = self.machine.launcher
        if launcher and launcher.runs:
            if self.parent is None or not self.parent.runs:
                launcher.system.child_ended(self.pid, exit_code)
        if self.machine.runner:
            self.machine.runner.sees_end()

    def response(self, number: int) -> Disposition:
        """Return what /proc says it does at a signal."""
        return Disposition.DEFAULT

    def on_end(self) -> None:
        """Have others notice."""


class Helper(Process):
    """What a rank has started in its own group, such as an upload: it ends by itself in a while."""

    def __init__(self, rank: Rank, seconds: float, *, ignores: bool) -> None:
        super().__init__(rank.machine, rank, leads=False)
        self.rank = rank
        self.ignores = ignores
        self.clock.after(seconds, self.end, 0)

    def on_signal(self, number: int) -> None:
        """End, or go on."""
        if not self.ignores:
            self.end(-number)
