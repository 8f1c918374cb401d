"""Simulated ranks: they train together, fail, hear each other's end, and save at a stop.

What they tell the launcher, and when, is what launcher/run/rank.py tells: that they run, and what
they raised, or that their script has ended.
"""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING

from launcher.errors import Disposition
from launcher.result.raised import Link
from simulation.machine import Helper, Process
from simulation.pipe import Pipe
from simulation.plan import AtBreak, AtStop, Fault, What

if TYPE_CHECKING:
    from simulation.torchrun import Torchrun

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
OWN = Link("ValueError", "loss is nan")
ECC = Link("RuntimeError", "CUDA error: uncorrectable ECC error encountered")
SECONDARY = Link("RuntimeError", "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


class World:
    """All ranks of one attempt, on all hosts: they train together, or not at all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: list[Rank] = []
        self.up = 0
        self.broken = False

    def joined(self, rank: Rank) -> None:
        """A rank's script runs; the last one has all of them begin to train."""
        self.up += 1
        if self.up == self.size and not self.broken:
            rank.job.watch.trains()
            for one in self.ranks:
                one.train()
        elif rank.script.at_break is AtBreak.GOES_ON and self.broken:
            rank.train()
        elif self.broken:
            rank.soon_hears_break()

    def breaks(self, by: Rank) -> None:
        """A rank's end breaks the others' connections to it."""
        if self.broken:
            return
        self.broken = True
        for rank in self.ranks:
            if rank is not by and rank.is_ready:
                rank.soon_hears_break()
                if rank.script.at_break is AtBreak.GOES_ON and self.up < self.size:
                    rank.train()  # it waits for nobody


class Rank(Process):
    """One rank's process.

    Attributes: `broken_by`, the fault of the plan that it fails with; `succeeds`, it has trained to
    the end; `secondary`, it fails because another one did.
    """

    def __init__(self, torchrun: Torchrun, world: World, rank: int, local_rank: int) -> None:
        super().__init__(torchrun.machine, torchrun)
        self.torchrun = torchrun
        self.world = world
        self.rank = rank
        self.local_rank = local_rank
        self.attempt = torchrun.attempt
        self.script = self.job.plan.script
        self.broken_by: Fault | None = None
        self.broken_at: float | None = None
        self.secondary = False
        self.succeeds = False
        self.has_said = False  # that it runs
        self.is_ready = False  # its script runs, and has its handlers
        self.is_dying = False  # it has said why, and is about to end
        self.saves_from: float | None = None
        self.lost_store = False
        self.script_ended = math.inf  # when it said so
        self.pipe: Pipe | None = None
        world.ranks.append(self)
        self.job.watch.ranks.append(self)
        self.clock.after(self.job.random.uniform(0.05, 0.3), self._run)

    # What it does by itself

    def _run(self) -> None:
        if not self.runs or self.is_dying:
            return
        if not self.script.is_python:
            self._get_ready()
            return
        self.has_said = True
        self.pipe = Pipe(self.machine)
        self.pipe.say({"rank": self.rank, "local_rank": self.local_rank, "pid": self.pid})
        self.clock.after(self.job.random.uniform(0.01, 0.2), self._get_ready)

    def _get_ready(self) -> None:
        if not self.runs or self.is_dying:
            return
        self.is_ready = True
        if self.script.upload:
            helper = Helper(self, self.script.upload, ignores=self.script.upload_ignores)
            self.job.watch.helpers.append(helper)
        self.world.joined(self)

    def train(self) -> None:
        """Train to the end, if nothing comes between."""
        longer = self.job.of(self.machine, What.HOST_SLOW)
        seconds = self.script.seconds + (longer.amount if longer else 0)
        self.clock.after(seconds, self._succeed)

    def _succeed(self) -> None:
        idle = self.broken_by is None and not self.secondary and self.saves_from is None
        waits = self.world.broken and self.script.at_break is not AtBreak.GOES_ON
        if self.runs and idle and not waits:
            self.succeeds = True
            self._say_script_ended()
            self.end(0)

    # What others do to it

    def fail(self, fault: Fault) -> None:
        """Do what the plan says; a rank can fail once."""
        if not self.runs or self.broken_by or self.secondary or not self.is_ready:
            return
        self.broken_by, self.broken_at = fault, self.clock.now
        self.job.watch.fault(fault, self.machine, self)
        what, later = fault.what, fault.amount
        own = (OWN,)
        if what is What.HANGS:
            return
        self.world.breaks(self)
        if what is What.RAISES:
            self.clock.after(later, self._raise, 1, own, 0.01)
        elif what is What.LINGERS:
            self._raise(1, own, later)
        elif what is What.HOOK:
            self._raise(42, own, later)
        elif what is What.FORGIVEN:
            self._raise(0, own, later)
        elif what is What.LEAVES:
            self._say_script_ended()
            self.is_dying = True
            self.clock.after(max(later, 0.01), self.end, 0)
        elif what is What.EXITS:
            self._raise(3, (Link(message="3"),), 0.01, said=3)
        elif what is What.GPU_FAILS:
            self._raise(1, (Link("ValueError", "no batch"), ECC._replace(how="cause")), 0.01)
        elif what is What.ENDS:
            self.end(42)
        elif what is What.KILLED:
            self.end(-signal.SIGKILL)
        else:
            self.end(-signal.SIGSEGV)

    def soon_hears_break(self) -> None:
        """Its next collective is going to fail, as another rank's end has broken the connection."""
        self.clock.after(self.job.random.uniform(0.01, 2.5), self._hears_break)

    def _hears_break(self) -> None:
        if not self.runs or self.broken_by or self.is_dying or self.saves_from is not None:
            return
        what = self.script.at_break
        if what in (AtBreak.WAITS, AtBreak.GOES_ON):
            return
        self.secondary = True
        if what is AtBreak.RAISES:
            self._raise(1, (SECONDARY,), 0.01)
        elif what is AtBreak.EXITS:
            self._raise(1, (Link(message="1"), SECONDARY._replace(how="context")), 0.01)
        else:
            self.end(-signal.SIGABRT)

    def _raise(
        self,
        code: int,
        chain: tuple[Link, ...],
        later: float,
        *,
        said: int = 1,
    ) -> None:
        """Say what was raised, and end `later` with a code, which the rank may not know itself."""
        if not self.runs:
            return
        self.is_dying = True
        if self.pipe:
            links = [link._asdict() for link in chain]
            self.pipe.say({"end": {"exit_code": said, "chain": links}})
        self.clock.after(max(later, 0.01), self.end, code)

    # Signals

    def response(self, number: int) -> Disposition:
        """Return what /proc says it does at a signal."""
        how = self.script.at_stop
        if not self.is_ready or how is AtStop.DIES:
            # Python has a handler of its own for SIGINT, from its start on.
            return Disposition.HANDLES if number == signal.SIGINT else Disposition.DEFAULT
        return Disposition.IGNORES if how is AtStop.IGNORES else Disposition.HANDLES

    def on_signal(self, number: int) -> None:
        """Save, die or go on, as the script has it."""
        how = self.script.at_stop if self.is_ready else AtStop.DIES
        if self.broken_by and self.broken_by.what is What.LINGERS:
            return
        if how is AtStop.IGNORES or number not in STOPS:
            return
        if how is AtStop.DIES:
            if number == signal.SIGINT and self.has_said:
                self._raise(-number, (Link("KeyboardInterrupt"),), 0.01, said=-number)
            else:
                self.end(-number)
        elif self.saves_from is None:
            if self.broken_by and self.broken_by.what is What.HANGS:
                return  # Python's handlers run between two of its own instructions
            self.saves_from = self.clock.now
            self.clock.after(self.script.save, self._saved, number)

    def _saved(self, number: int) -> None:
        if not self.runs or self.broken_by:
            return
        if self.script.at_stop is AtStop.FAILS:
            self._raise(1, (Link("OSError", "no space left on device"),), 0.01)
        elif self.script.save_code:
            self._raise(128 + number, (Link(message=str(128 + number)),), 0.01, said=128 + number)
        else:
            self._say_script_ended()
            self.end(0)

    def _say_script_ended(self) -> None:
        self.script_ended = self.clock.now
        if self.pipe:
            about = {"rank": self.rank, "local_rank": self.local_rank}
            self.pipe.say({**about, "script_ended": self.pid})

    def loses_store(self) -> None:
        """The torchrun is gone that keeps the ranks' store; what it saves needs the others."""
        if self.runs and self.is_ready:
            self.lost_store = True
            self.job.watch.loses_store(self)
            self.soon_hears_break()

    def on_end(self) -> None:
        """Break the others' connections, and have torchrun and the launcher notice."""
        self.job.watch.quiet_from = None
        if not self.succeeds:
            self.world.breaks(self)
        # torchrun may reap it before the launcher can look.
        self.reaped = self.torchrun.watches() and self.job.random.random() < 0.1
        if self.pipe:
            self.pipe.close()
        self.torchrun.rank_ended()
