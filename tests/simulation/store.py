"""Where the simulated torchruns meet, and what makes the ranks' stores (launcher/run/store.py)."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from selectors import EVENT_READ
from typing import TYPE_CHECKING, Any, Callable

from launcher.text.protocol import Lines, decoded, encoded
from simulation.machine import Machine, Process
from simulation.plan import What
from simulation.system import End

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.torchrun import Torchrun

# In seconds,
LOST = (0.4, 0.9)  # until a torchrun notices that its store is gone,
THROUGH = (0.01, 0.2)  # that all are through;
MAKES = (0.5, 2.0)  # until the first store is made, for which torch has to be imported.


class Meeting:
    """Torchruns wait for each other in the first host's, start ranks, and leave together."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.host: Torchrun | None = None
        self._waiting: list[Torchrun] = []
        self._through: set[Torchrun] = set()  # in the exit barrier

    def is_reached_by(self, torchrun: Torchrun) -> bool:
        """Tell whether a torchrun can talk to the first host's."""
        host = self.host
        return host is not None and host.runs and host.machine.reaches(torchrun.machine)

    def join(self, torchrun: Torchrun) -> None:
        """Wait for all others; the last lets all begin."""
        self._waiting.append(torchrun)
        if len(self._waiting) == self.job.plan.hosts:
            for number, member in enumerate(sorted(self._waiting, key=_number)):
                member.soon((0.01, 0.1), member.meets, number)

    def passes(self, torchrun: Torchrun) -> None:
        """A torchrun is through, and waits in the exit barrier for all others."""
        self._through.add(torchrun)
        if len(self._through) == self.job.plan.hosts:
            for member in self._waiting:
                member.soon(THROUGH, member.leaves_barrier)

    def breaks_for(self, torchrun: Torchrun) -> None:
        """A torchrun has lost it: it is told so where the other end has hung up, else it waits."""
        if self.host is None or torchrun is self.host or not torchrun.runs:
            return
        if torchrun.machine.reaches(self.host.machine):
            torchrun.soon(LOST, torchrun.loses_store)
        else:
            torchrun.is_stuck = True

    def ends(self, torchrun: Torchrun) -> None:
        """A torchrun has ended, or is out of reach: ranks of the first attempt use its store."""
        if torchrun is self.host:
            for member in self._waiting:
                self.breaks_for(member)
            self.job.loses_store(0)


def _number(torchrun: Torchrun) -> int:
    return torchrun.machine.number


class RankStore(Process):
    """The launcher's helper that makes a store for each attempt, and holds the last two."""

    is_helper = True

    def __init__(self, machine: Machine, take: Callable[[Mapping[str, Any] | None], None]) -> None:
        super().__init__(machine, None)
        machine.store = self
        self._take_in, self._has_begun = take, False
        self._end, self._lines = End(self._asked, lambda: None), Lines(1 << 16)
        self._selector = machine.launcher.system.selector  # type: ignore[union-attr]
        self._selector.register(self._end, EVENT_READ, self._read)

    def _read(self) -> None:
        data = self._end.recv(1 << 16)
        for line in self._lines.feed(data):
            self._take_in(decoded(line))
        if not data:
            self._take_in(None)

    def _asked(self, data: bytes) -> None:
        """Be sent something, which is send()'s."""

    def send(self, message: Mapping[str, Any]) -> bool:
        """Make a store, which takes a while; say its port, or why there is none."""
        self.soon((0.001, 0.01) if self._has_begun else MAKES, self._made)
        self._has_begun = True
        return self.runs

    def _made(self) -> None:
        slow = self.job.of(self.machine, What.STORE_SLOW)
        if slow:
            self.soon((slow.amount, slow.amount), self._says)
        else:
            self._says()

    def _says(self) -> None:
        if self.job.of(self.machine, What.STORE_FAILS):
            self._tells({"port": 0, "why": "OSError: no address"})
        else:
            self.job.ports.append(30000 + len(self.job.ports))
            self._tells({"port": self.job.ports[-1]})

    def _tells(self, message: Mapping[str, Any]) -> None:
        self._end.comes(encoded(message))

    def close(self) -> None:
        """Be killed by the launcher, which does not hear of it."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._end)
        self.signal(signal.SIGKILL)

    def on_end(self) -> None:
        """Have the launcher notice, and the ranks that use what it holds."""
        self.job.ports.clear()
        for attempt in range(2, 2 + self.job.plan.max_restarts):
            self.job.loses_store(attempt)
        self._end.loses()
