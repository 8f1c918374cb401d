"""Simulated torchruns: each starts a host's ranks, watches them, and ends or restarts them.

It behaves as torch.distributed.run does below launcher/run/agent.py: it asks the launcher before it
ends ranks, and before it starts them again, and waits for the answer.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from launcher.result.causes import RankFailure
from launcher.run.events import TorchrunAsks, TorchrunEnded, TorchrunStarts, Why
from simulation.machine import Machine
from simulation.ranks import NO_OOM, Rank, World
from simulation.talking import Doing, Talking

if TYPE_CHECKING:
    from simulation.store import Store

# In seconds.
BOOT = (0.5, 1.0)  # until it has imported torch
POLL = (0.001, 0.1)  # until it looks at its ranks again
OWN_TIMEOUT = 30.0  # for ranks to end, where the launcher says no other


class Torchrun(Talking):
    """One host's torchrun.

    `refuses` is what it says, and ends with, in place of starting.
    """

    def __init__(self, machine: Machine, store: Store, refuses: str = "") -> None:
        super().__init__(machine)
        machine.torchrun = self
        self.store = store
        self.refuses = refuses
        self.has_handlers = False
        self.restarts_left = self.job.plan.max_restarts
        self.was_closed = False  # these ranks were
        self.why = Why.FAILURE
        self.living = False  # ranks were, when it began to end them
        self.number = 0  # the signal that it was sent
        self.late = 0  # one that came while it could not act on it
        self.error = ""
        self._soon(BOOT, self._boot, Doing.BOOTING)

    # Meeting

    def _boot(self) -> None:
        if self.refuses:
            self._fail(self.refuses)
            return
        if self.machine.number == 0:
            self.store.host = self
        self._meet()

    def _meet(self) -> None:
        """Wait for the other hosts' torchruns, for at most the start time-out."""
        self.doing = Doing.MEETING
        most = self.job.plan.start_timeout
        self._soon((most, most), self._meets_nobody, Doing.MEETING)
        self._join()

    def _join(self) -> None:
        if self.store.is_reached_by(self):
            self.store.join(self)
        elif self.store.host is None:
            self._soon((0.05, 0.2), self._join, Doing.MEETING)
        else:
            self.store.breaks_for(self)

    def _meets_nobody(self) -> None:
        self._fail("RendezvousTimeoutError: the hosts did not all come")

    def meets(self, world: World, number: int) -> None:
        """All hosts' torchruns are here: start the ranks."""
        self._go_on(lambda: self._start_ranks(world, number), Doing.MEETING, self.asked)

    def _start_ranks(self, world: World, number: int) -> None:
        self.has_handlers = True
        self.doing = Doing.STARTING
        self.was_closed = False
        nproc = self.job.plan.nproc
        self.ranks = [Rank(self, world, number * nproc + one, one) for one in range(nproc)]
        self._soon((0.01, 0.05), self._started, Doing.STARTING)

    def _started(self) -> None:
        self.doing = Doing.RUNNING
        self.rank_ended()
        self.sees_waiting()
        self._act_on_late_signal()

    # Watching

    def rank_ended(self) -> None:
        """One of its ranks may have ended, which it sees when it looks."""
        if self.doing is Doing.RUNNING:
            self._soon(POLL, self._look, Doing.RUNNING)
        elif self.doing is Doing.CLOSING and not self._any_runs():
            self._soon((0.001, 0.001), self._closed, Doing.CLOSING)

    def _look(self) -> None:
        codes = [rank.exit_code for rank in self.ranks]
        if any(codes):
            self._ask(Why.RESTART if self.restarts_left else Why.FAILURE)
        elif None not in codes:
            self.doing = Doing.BARRIER
            if self.store.is_reached_by(self):
                self.store.passes(self)
            else:
                self.store.breaks_for(self)

    def sees_waiting(self) -> None:
        """Another host's torchrun waits to start ranks again: all have to."""
        if self.store.waiting and self not in self.store.waiting:
            self._go_on(lambda: self._ask(Why.RESTART), Doing.RUNNING, self.asked)

    def loses_store(self) -> None:
        """Its store is gone, which it notices where it needs it."""
        error = "RendezvousConnectionError: the connection to the C10d store has failed"
        if not self.runs or self.hangs:
            return
        if self.doing is Doing.RUNNING:
            self._ask(Why.ERROR, error)
        elif self.doing is Doing.MEETING:
            self._fail(error)
        elif self.doing is Doing.BARRIER:
            self.end(0)

    def leaves_barrier(self) -> None:
        """All hosts are through."""
        self._go_on(lambda: self.end(0), Doing.BARRIER, self.asked)

    # Ending ranks

    def _any_runs(self) -> bool:
        return any(rank.runs for rank in self.ranks)

    def _ask(self, why: Why, error: str = "") -> None:
        """Ask the launcher, which decides how long the ranks have; go on without one."""
        self.doing = Doing.ASKING
        self.asked += 1
        self.why, self.error = why, error or self.error
        self.was_closed = True
        self.living = self._any_runs()
        self._say_codes()
        self._say(TorchrunAsks(why, error))

    def answered(self, asked: int, timeout: float | None) -> None:
        """The launcher has answered: end the ranks, or meet the other hosts again."""
        if self.doing is Doing.CLEARING:
            self._go_on(self._meet, Doing.CLEARING, asked)
        else:
            seconds = OWN_TIMEOUT if timeout is None else timeout
            self._go_on(lambda: self._close(seconds), Doing.ASKING, asked)

    def _close(self, seconds: float) -> None:
        """Tell each rank's own process once, and kill its group when the time is over."""
        self.doing = Doing.CLOSING
        number = self.number if self.why is Why.STOP else signal.SIGTERM
        for rank in self.ranks:
            if rank.runs and not rank.was_told:
                rank.was_told = True
                rank.signal(number)
        self._soon((seconds, seconds), self._kill, Doing.CLOSING)
        self.rank_ended()
        self._act_on_late_signal()

    def _kill(self) -> None:
        for rank in [rank for rank in self.ranks if rank.runs]:
            for process in list(self.machine.processes.values()):
                if process.session == rank.pid:
                    process.signal(signal.SIGKILL)

    def _closed(self) -> None:
        if self.living:
            self._say_codes()
        if self.why is not Why.RESTART:
            self.end(1)
            return
        if any(rank.exit_code and not rank.was_told for rank in self.ranks):
            self.restarts_left -= 1  # one that another host began costs none
        self.doing = Doing.CLEARING
        self.asked += 1
        self._say(TorchrunStarts())

    # Signals, and the end

    def on_signal(self, number: int) -> None:
        """End the ranks, or die where there are no handlers yet."""
        if self.hangs or self.is_stuck or self.doing is Doing.BARRIER:
            return
        if not self.has_handlers:
            self.end(-number)
            return
        if self.doing in (Doing.STARTING, Doing.ASKING):
            self.late = self.late or number  # until all ranks are started, or told to end
            return
        self.number = number
        failed = any(rank.exit_code for rank in self.ranks)
        if self._any_runs() or (failed and not self.was_closed):
            self._ask(Why.STOP)
        else:
            self.end(1)

    def _act_on_late_signal(self) -> None:
        number, self.late = self.late, 0
        if number:
            self.on_signal(number)

    def _fail(self, error: str) -> None:
        self.error = error
        self.end(1)

    def on_end(self) -> None:
        """Tell the launcher why, and lose the store for all if it is here."""
        failures = ()
        if self.why is Why.FAILURE and self.exit_code == 1 and not self.error:
            failures = tuple(
                RankFailure(rank.rank, rank.local_rank, rank.exit_code, oom=_oom(rank))
                for rank in self.ranks
                if rank.exit_code
            )
        assert self.exit_code is not None
        error = self.error if self.exit_code == 1 else ""
        ended = TorchrunEnded(self.exit_code, failures, error)
        if self.machine.runner:
            self._say(self.machine.runner.outlives(ended))
        else:
            self._say(ended)
        if self.store.host is self:
            self.store.breaks()


def _oom(rank: Rank) -> str:
    return NO_OOM if rank.exit_code == -signal.SIGKILL else ""
