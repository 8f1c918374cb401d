"""Where the simulated torchruns of one attempt meet: the store in the first host's torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.ranks import World

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.torchrun import Torchrun

# In seconds, until a torchrun notices
LOST = (0.4, 0.9)  # that the store is gone,
THROUGH = (0.01, 0.2)  # that all are through.


class Store:
    """The torchruns of an attempt wait for each other, start ranks, and leave together.

    `host` is the torchrun that serves it, `keeper` that which keeps the ranks' store.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.host: Torchrun | None = None
        self.keeper: Torchrun | None = None
        self.world: World | None = None
        self._waiting: list[Torchrun] = []
        self._through: set[Torchrun] = set()  # in the exit barrier

    def is_reached_by(self, torchrun: Torchrun) -> bool:
        """Tell whether a torchrun can talk to it."""
        host = self.host
        return host is not None and host.runs and host.machine.reaches(torchrun.machine)

    def _soon(self, within: tuple[float, float]) -> float:
        return self.job.clock.now + self.job.random.uniform(*within)

    def join(self, torchrun: Torchrun) -> None:
        """Wait for all others; the last lets all begin."""
        self._waiting.append(torchrun)
        if len(self._waiting) < self.job.plan.hosts:
            return
        members = sorted(self._waiting, key=lambda member: member.machine.number)
        # The first of their addresses, which need not be the first host's.
        self.keeper = members[-1 if self.job.plan.seed % 5 == 4 else 0]
        self.world = World(self.job.plan.nproc * len(members))
        for number, member in enumerate(members):
            self.job.clock.at(self._soon((0.01, 0.1)), member.meets, self.world, number)

    def passes(self, torchrun: Torchrun) -> None:
        """A torchrun is through, and waits in the exit barrier for all others."""
        self._through.add(torchrun)
        if len(self._through) == self.job.plan.hosts:
            for member in self._waiting:
                self.job.clock.at(self._soon(THROUGH), member.leaves_barrier)

    def breaks_for(self, torchrun: Torchrun) -> None:
        """A torchrun has lost it: it is told so where the other end has hung up, else it waits."""
        if self.host is None or torchrun is self.host or not torchrun.runs:
            return
        if torchrun.machine.reaches(self.host.machine):
            self.job.clock.at(self._soon(LOST), torchrun.loses_store)
        else:
            torchrun.is_stuck = True

    def ends(self, torchrun: Torchrun) -> None:
        """A torchrun has ended, or is out of reach."""
        if torchrun is self.host:
            for member in self._waiting:
                self.breaks_for(member)
        if torchrun is self.keeper and self.world:
            for rank in self.world.ranks:
                rank.loses_store()
