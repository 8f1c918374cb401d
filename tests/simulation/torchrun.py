"""Simulated torchruns: each starts a host's ranks, watches them, and waits for the launcher.

It behaves as torch.distributed.run does below launcher/run/agent.py, and speaks as that does.
"""

from __future__ import annotations

import enum
import math
import signal
from typing import TYPE_CHECKING, Any, Callable

from simulation.machine import Machine, Process
from simulation.nursery import Fork
from simulation.pipe import Pipe
from simulation.plan import What
from simulation.ranks import Rank, World
from simulation.starting import Starter

if TYPE_CHECKING:
    from simulation.nursery import Nursery
    from simulation.store import Store

# In seconds.
BOOT = (0.5, 1.0)  # until it has imported torch
FORKED = (0.02, 0.1)  # until it is as far if it was forked
CONNECTS = (0.02, 0.05)  # until it has connected to the launcher
POPEN = (0.001, 0.01)  # until it has started one more process
SEES = (0.0002, 0.02)  # until it sees what becomes of one that it waits for
POLL = (0.001, 0.1)  # until it looks at its ranks again
LOST = (0.4, 0.9)  # until it notices in its barrier that its store is gone


class Doing(enum.Enum):
    """What a torchrun is at."""

    BOOTING = "booting"
    MEETING = "meeting"  # it waits for the other hosts' torchruns
    ASKING = "asking"  # whether it may start ranks
    STARTING = "starting"  # ranks; then it waits for their pids
    RUNNING = "running"
    WAITING = "waiting"  # until the launcher says that no rank is left
    ENDING = "ending"  # its ranks, since the launcher was killed
    BARRIER = "barrier"  # all its ranks have succeeded; it waits for the other hosts', and is deaf
    LEAVING = "leaving"


class Torchrun(Process):
    """One host's torchrun.

    Attributes: `refuses`, what it says, and ends with, in place of starting; `hangs`, it does
    nothing any more; `is_stuck`, it waits for a store that does not answer, and is as deaf;
    `starters`, what it has started; `pids`, `exit_codes` of ranks, as told, by rank; `nursery`,
    what has forked it, and forks its ranks.
    """

    def __init__(
        self, machine: Machine, store: Store, refuses: str = "", nursery: Nursery | None = None
    ) -> None:
        super().__init__(machine, machine.runner, leads=False)
        machine.torchrun = self
        self.store, self.refuses = store, refuses
        self.doing = Doing.BOOTING
        self.hangs = self.is_stuck = self.has_handlers = False
        self.hangs_in_start = False  # it will, when it has started ranks
        self.nursery = nursery
        self.starters: list[Starter | Fork] = []
        self._forks: list[Fork] = []  # all, whatever was answered
        self.exit_codes: dict[int, int] = {}
        self.pids: dict[int, int] = {}  # of ranks, as it was told
        self._reported: set[int] = set()  # ranks whose first process has ended
        self._asked = 0
        self._pipe: Pipe | None = None
        self._go: Callable[[], None] | None = None  # what it does when it has leave
        self._soon(CONNECTS, self._connect, Doing.BOOTING)

    def _soon(self, within: tuple[float, float], act: Callable[[], None], doing: Doing) -> None:
        """Do something in a while, if it still does what it does then."""
        self.clock.after(self.job.random.uniform(*within), self._if_still, act, doing, self._asked)

    def _if_still(self, act: Callable[[], None], doing: Doing, asked: int) -> None:
        awake = self.runs and not self.hangs and not self.is_stuck
        if awake and self.doing is doing and asked == self._asked:
            act()

    # AtRendezvous.

    def _connect(self) -> None:
        self._pipe = Pipe(self.machine, self._hears, self._loses_launcher, self.folder)
        if not self._pipe.is_open:
            self.end(1)
            return
        self._pipe.say({"torchrun_pid": self.pid})
        if self.nursery:
            self.nursery.knows_torchrun(runs=True)
        self._soon(FORKED if self.nursery else BOOT, self._boot, Doing.BOOTING)

    def _boot(self) -> None:
        if self.refuses:
            self._fail(self.refuses)
            return
        if self.machine.number == 0:
            self.store.host = self
        self.doing = Doing.MEETING
        self._say({"at_rendezvous": True})
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
        """All hosts' torchruns are here: ask to start the ranks."""
        self._if_still(lambda: self._ask_to_start(world, number), Doing.MEETING, self._asked)

    def _ask_to_start(self, world: World, number: int) -> None:
        self.doing = Doing.ASKING
        nproc = self.job.plan.nproc
        ranks = [(number * nproc + one, one) for one in range(nproc)]
        self._go = lambda: self._start_ranks(world, ranks)
        about = {"keeps_store": self.keeps_a_store, "world": nproc * self.job.plan.hosts}
        self._ask({"starts": ranks, **about})

    def _start_ranks(self, world: World, ranks: list[tuple[int, int]]) -> None:
        self.doing, self.has_handlers = Doing.STARTING, True
        if len(self.starters) < len(ranks):
            if self.nursery:
                self._has_forked(self.nursery, world, ranks)
            else:
                self._starts_cold(world, ranks)
            return
        self.hangs = self.hangs_in_start
        self._wait_for_pids()

    def _has_forked(self, nursery: Nursery, world: World, ranks: list[tuple[int, int]]) -> None:
        """Have the nursery fork the next one, and wait for its answer."""

        def go_on(has_said: bool) -> None:
            if has_said:
                self.starters.append(fork)
                self._start_ranks(world, ranks)
            else:
                self._say({"cold": "the process that forks them has ended, or cannot fork"})
                self._starts_cold(world, ranks, fork)

        def then(has_said: bool) -> None:
            self._if_still(lambda: go_on(has_said), Doing.STARTING, self._asked)

        fork = Fork(nursery, self, world, *ranks[len(self.starters)], then)
        self._forks.append(fork)

    def _starts_cold(
        self, world: World, ranks: list[tuple[int, int]], fork: Fork | None = None
    ) -> None:
        """Start the next one itself; `fork` is what the nursery has not answered for."""
        self.starters.append(Starter(self, world, *ranks[len(self.starters)], fork))
        self._soon(POPEN, lambda: self._start_ranks(world, ranks), Doing.STARTING)

    def _wait_for_pids(self) -> None:
        """Wait for one after the other: until each is said, or will not be."""
        for starter in self.starters:
            if starter.rank not in self.pids and starter.rank not in self.exit_codes:
                for one in self.starters:
                    self._report_end(one)
                return
        self.doing = Doing.RUNNING
        self._looks_again()

    def _report_end(self, starter: Starter | Fork) -> None:
        """Report once that it has ended: the launcher says whether it has become the rank."""
        if starter.exit_code is not None and starter.rank not in self._reported:
            self._reported.add(starter.rank)
            about = {"rank": starter.rank, "pid": starter.pid, "exit_code": starter.exit_code}
            self._say({"not_started": about})

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that there are of those that it has started."""
        found = []
        for starter in self.starters:
            process, before = starter.process, getattr(starter, "before", None)
            if before and before.process and before.process.let_go_at < math.inf:
                process = before.process
            found += [process] if process else []
        return found

    @property
    def keeps_a_store(self) -> bool:
        """Whether others need a store that is here."""
        return self is self.store.host or self is self.store.keeper

    # Watching.

    def starter_ended(self) -> None:
        """What was to become a rank has ended."""
        if self.doing is Doing.STARTING:
            self._soon(SEES, self._see_start, Doing.STARTING)
        self.rank_ended()

    def _see_start(self) -> None:
        if len(self.starters) == self.job.plan.nproc:
            self._wait_for_pids()

    def rank_ended(self) -> None:
        """One of its ranks has ended, which it sees by itself where the launcher is gone."""
        if self.doing is Doing.ENDING and not self._left():
            self._soon((1.0, 1.1), lambda: self.end(1), Doing.ENDING)

    def _left(self) -> list[Any]:
        """Return its ranks that run, and what may become one."""
        forked = [fork.process for fork in self._forks if fork.process]
        return [one for one in (*self.starters, *self.ranks, *forked) if one.runs]

    def _looks_again(self) -> None:
        self._soon(POLL, self._look, Doing.RUNNING)

    def _look(self) -> None:
        codes = [self.exit_codes.get(starter.rank) for starter in self.starters]
        if any(codes) or None not in codes:
            self._ask_to_end()

    def loses_store(self) -> None:
        """Its store is gone, which it notices where it needs it."""
        error = "RendezvousConnectionError: the connection to the C10d store has failed"
        if not self.runs or self.hangs:
            return
        if self.doing is Doing.RUNNING:
            self._ask_to_end(error=error)
        elif self.doing is Doing.MEETING:
            self._fail(error)
        elif self.doing is Doing.BARRIER:
            self.end(0)

    # The launcher.

    def _say(self, message: dict[str, Any]) -> None:
        if self._pipe:
            self._pipe.say(message)

    def _ask(self, message: dict[str, Any]) -> None:
        self._asked += 1
        self._say({**message, "request": self._asked})

    def _ask_to_end(self, number: int = 0, error: str = "") -> None:
        self.doing = Doing.WAITING
        self._ask({"close": True, "signal": number, "error": error, "tees": False})

    def _hears(self, message: dict[str, Any]) -> None:
        if "request" not in message:
            self._hears_of_rank(message)
            return
        if message.get("request") != self._asked or not self.runs or self.hangs or self.is_stuck:
            return
        if self.doing is Doing.ASKING and self._go:
            self._go()
        elif self.doing is Doing.WAITING:
            self.job.watch.answers(self)
            if message["depart"]:
                self.doing = Doing.LEAVING
                self._soon((0.005, 0.05), lambda: self.end(1), Doing.LEAVING)
            elif any(self.exit_codes.values()):
                self._fail("")
            else:
                self.doing = Doing.BARRIER
                breaks = any(one.what is What.LEAVES_BARRIER for one in self.job.plan.faults)
                if breaks and not self.keeps_a_store:
                    self._soon(LOST, lambda: self.end(0), Doing.BARRIER)
                elif self.store.is_reached_by(self):
                    self.store.passes(self)
                else:
                    self.store.breaks_for(self)

    def _hears_of_rank(self, message: dict[str, Any]) -> None:
        """Its thread that reads notes it, whatever the others do."""
        if "pid" in message:
            self.pids[message["rank"]] = message["pid"]
        else:
            self.exit_codes[message["rank"]] = message["exit_code"]
        if self.doing is Doing.STARTING:
            self._soon(SEES, self._see_start, Doing.STARTING)
        elif self.doing is Doing.RUNNING:
            self._looks_again()

    def leaves_barrier(self) -> None:
        """All hosts are through."""
        self._if_still(lambda: self.end(0), Doing.BARRIER, self._asked)

    def _loses_launcher(self) -> None:
        """Its launcher was killed: its thread ends the ranks, also while all else waits."""
        self.doing, self.is_stuck = Doing.ENDING, False
        grace = self.job.plan.grace
        self._soon((grace, grace), self._kill, Doing.ENDING)
        self.rank_ended()

    def _kill(self) -> None:
        for left in self._left():
            for process in list(self.machine.processes.values()):
                if process.session == left.pid:
                    process.signal(signal.SIGKILL)
        self.end(1)

    # Signals, and the end.

    def on_signal(self, number: int) -> None:
        """Ask again for a signal, or die where there are no handlers yet."""
        if not self.has_handlers:
            self.end(-number)
        elif self.hangs or self.is_stuck:
            return
        elif self.doing in (Doing.STARTING, Doing.RUNNING, Doing.WAITING):
            self._ask_to_end(number)

    def _fail(self, error: str, number: int = 0) -> None:
        self._say({"exit_code": 1, "error": error, "signal": number})
        self.end(1)

    @property
    def is_known(self) -> bool:
        """Whether the launcher knows it: one that is forked says so itself."""
        return self._pipe is not None or self.nursery is None

    def on_end(self) -> None:
        """Have the kernel tell the launcher, and lose the store for all if it is here."""
        if self.nursery and not self.is_known:
            self.nursery.knows_torchrun(runs=False)
        if self._pipe:
            if self.exit_code == 0:
                self._say({"exit_code": 0})
            self._pipe.close()
        launcher = self.machine.launcher
        if launcher and launcher.runs:
            for starter in self.starters:  # which it need not have reaped
                if isinstance(starter, Starter) and starter.exit_code is not None:
                    launcher.system.child_ended(starter.pid, starter.exit_code)
        self.store.ends(self)
