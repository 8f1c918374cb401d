"""Where simulated torchruns meet: the store in the first host's torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.ranks import World

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.torchrun import Torchrun

# In seconds, until a torchrun notices
LOST = (0.4, 0.9)  # that the store is gone,
WAITING = (1.0, 2.1)  # that another one waits to start ranks again,
THROUGH = (0.01, 0.2)  # that all are through.


class Store:
    """One round after the other: all hosts' torchruns wait for each other, then start ranks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.host: Torchrun | None = None  # that serves it
        self.waiting: list[Torchrun] = []
        self.members: list[Torchrun] = []  # of the last round
        self.through: set[Torchrun] = set()  # those of them that are in the exit barrier

    def is_reached_by(self, torchrun: Torchrun) -> bool:
        """Tell whether a torchrun can talk to it."""
        host = self.host
        return host is not None and host.runs and host.machine.reaches(torchrun.machine)

    def soon(self, within: tuple[float, float]) -> float:
        """Return when something is noticed."""
        return self.job.clock.now + self.job.random.uniform(*within)

    def join(self, torchrun: Torchrun) -> None:
        """Wait for all others, which are to restart if they train; the last lets all begin."""
        clock = self.job.clock
        self.waiting.append(torchrun)
        if len(self.waiting) < self.job.plan.hosts:
            for member in self.members:
                clock.at(self.soon(WAITING), member.sees_waiting)
            return
        self.members, self.waiting = self.waiting, []
        self.through.clear()
        world = World(self.job.plan.nproc * len(self.members))
        self.members.sort(key=lambda member: member.machine.number)
        for number, member in enumerate(self.members):
            clock.at(self.soon((0.01, 0.1)), member.meets, world, number)

    def passes(self, torchrun: Torchrun) -> None:
        """A torchrun is through, and waits in the exit barrier for all others of its round."""
        self.through.add(torchrun)
        if len(self.through) == len(self.members):
            for member in self.members:
                self.job.clock.at(self.soon(THROUGH), member.leaves_barrier)

    def breaks_for(self, torchrun: Torchrun) -> None:
        """A torchrun has lost it: it is told so where the other end has hung up, else it waits."""
        if self.host is None or torchrun is self.host or not torchrun.runs:
            return
        if torchrun.machine.reaches(self.host.machine):
            self.job.clock.at(self.soon(LOST), torchrun.loses_store)
        else:
            torchrun.is_stuck = True

    def breaks(self) -> None:
        """The torchrun that serves it has ended, or its host is gone."""
        for machine in self.job.machines:
            if machine.torchrun:
                self.breaks_for(machine.torchrun)
