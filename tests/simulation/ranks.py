"""Simulated ranks: they train together, fail, hear each other's end, and save at a stop.

What they tell the launcher, and when, is what launcher/run/rank.py tells: who they are, before they
wait for go; and what they raised, or that their script has ended.
"""

from __future__ import annotations

import functools
import math
import signal
from typing import TYPE_CHECKING, Any

from launcher.result.raised import Link
from simulation.machine import Process, Upload
from simulation.plan import AtBreak, AtStop, Fault, What

if TYPE_CHECKING:
    from simulation.keeper import Keeper

STARTS = (0.01, 0.2)  # seconds, until its script has its handlers
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
        self.late: Rank | None = None  # in a collective, where the others wait for it
        self.late_from = math.inf

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

    def waits_for(self, rank: Rank) -> None:
        """A rank begins no collective any more."""
        if self.late is None:
            self.late, self.late_from = rank, rank.clock.now

    def goes_on(self, rank: Rank) -> None:
        """The rank that the others have waited for is there again."""
        if self.late is rank:
            self.late, self.late_from = None, math.inf
            for one in self.ranks:
                if one.is_through:
                    one.succeed()

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
    """One rank's process, which its keeper has started.

    Attributes: `broken_by`, the fault of the plan that it fails with; `succeeds`, it has trained to
    the end; `secondary`, it fails because another one did.
    """

    is_tied = True

    def __init__(self, keeper: Keeper, attempt: int, port: int) -> None:
        super().__init__(keeper.machine, keeper, attempt)
        self.keeper, self.port = keeper, port
        self.rank, self.local_rank = keeper.rank, keeper.local_rank
        self.world = self.job.world(attempt)
        self.script = self.job.plan.script
        self.broken_by: Fault | None = None
        self.broken_at: float | None = None
        self.secondary = False
        self.is_through = self.succeeds = False
        self.is_ready = False  # its script runs, and has its handlers
        self.is_dying = False  # it has said why, and is about to end
        self.saves_from: float | None = None
        self.lost_store = False
        self.script_ended = math.inf  # when it said so
        self.upload: Upload | None = None
        self.world.ranks.append(self)
        self.job.watch.starts_script(self)
        self.soon(STARTS, self._get_ready)

    def _say(self, message: dict[str, Any]) -> None:
        if self.script.is_python or not self.is_ready:
            self.keeper.relays(message)

    def hears(self, request: dict[str, Any]) -> None:
        """Say how far it is, and where (launcher/watch/in_rank.py)."""
        where = [["step", "train.py", 7]]
        if self.is_held or not self.is_ready or not self.job.plan.watch or "signal" in request:
            return
        world = self.world
        moves = {**request, **({"threads": [["", where]]} if "stacks" in request else {})}
        still = self.clock.now - world.late_from
        goes_on = self.script.at_break is AtBreak.GOES_ON and self is not world.late
        if still <= 0 or world.up < world.size or world.broken or goes_on:
            self._say(moves)
            return
        waits = 0 if self is world.late else 7
        group = {"ranks": f"0-{world.size - 1}", "last": waits or 6, "waits": waits}
        if world.size == 1:
            group["ranks"] = "0"
        if waits:
            group["op"] = "all_reduce"
        self._say({**moves, "unchanged": still, "threads": [["", where]], "groups": [group]})

    # What it does by itself

    def _get_ready(self) -> None:
        if not self.runs or self.is_dying:
            return
        self.is_ready = True
        if self.script.upload:
            self.upload = Upload(self, self.script.upload, ignores=self.script.upload_ignores)
            self.job.watch.uploads.append(self.upload)
        if self.job.plan.watch:
            self._say({"watch": 0})
        if self.port in (0, *self.job.ports):  # else it waits for a store that is not there
            self.world.joined(self)

    def train(self) -> None:
        """Train to the end, if nothing comes between."""
        longer = self.job.of(self.machine, What.HOST_SLOW)
        seconds = self.script.seconds + (longer.amount if longer else 0)
        self.clock.after(seconds, self.succeed)

    def succeed(self) -> None:
        """Be through, if all others are still there."""
        self.is_through = True
        idle = self.broken_by is None and not self.secondary and self.saves_from is None
        late = self.world.late not in (None, self)
        waits = (self.world.broken or late) and self.script.at_break is not AtBreak.GOES_ON
        if self.runs and idle and not waits and not self.waits_for_kernel(self.succeed):
            self.succeeds = True
            self._say_script_ended()
            self.end(0)

    # What others do to it

    def _comes_free(self) -> None:
        super()._comes_free()
        if self.runs:
            self.world.goes_on(self)

    def get_stuck(self, fault: Fault) -> None:
        """Be held by the kernel, or have what it has started held."""
        process = self.upload if fault.what is What.LEFT_STUCK else self
        if process is None or not process.runs or not self.is_ready or process.is_held:
            return
        self.job.watch.fault(fault, self.machine, self)
        process.hold(fault.amount)
        if process is self:
            self.world.waits_for(self)

    def fail(self, fault: Fault) -> None:
        """Do what the plan says; a rank can fail once."""
        idle = self.broken_by is None and not self.secondary and not self.succeeds
        if not self.runs or not idle or not self.is_ready or self.is_held:
            return
        self.broken_by, self.broken_at = fault, self.clock.now
        self.job.watch.fault(fault, self.machine, self)
        what, later = fault.what, fault.amount
        own = (OWN,)
        if what is What.HANGS:
            self.world.waits_for(self)
            return
        self.world.breaks(self)
        if what is What.RAISES:
            chain = [link._asdict() for link in own]
            self._say({"thread": "pin", "chain": chain})  # it fails of what a thread has raised
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
        if self.waits_for_kernel(self._hears_break):
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
        if self.waits_for_kernel(functools.partial(self._raise, code, chain, later, said=said)):
            return
        self.is_dying = True
        links = [link._asdict() for link in chain]
        self._say({"end": {"exit_code": said, "chain": links, "notes": []}})
        self.clock.after(max(later, 0.01), self.end, code)

    # Signals

    def response(self, number: int) -> str:
        """Return what /proc says it does at a signal."""
        how = self.script.at_stop
        if not self.is_ready or how is AtStop.DIES:
            # Python has a handler of its own for SIGINT, from its start on.
            return "handles" if number == signal.SIGINT else "default"
        return "ignores" if how is AtStop.IGNORES else "handles"

    def on_signal(self, number: int) -> None:
        """Save, die or go on, as the script has it."""
        how = self.script.at_stop if self.is_ready else AtStop.DIES
        if self.broken_by and self.broken_by.what is What.LINGERS:
            return
        if how is AtStop.IGNORES or number not in STOPS:
            return
        if how is AtStop.DIES:
            if number == signal.SIGINT and self.script.is_python:
                self._raise(-number, (Link("KeyboardInterrupt"),), 0.01, said=-number)
            else:
                self.end(-number)
        elif self.saves_from is None:
            if self.broken_by and self.broken_by.what is What.HANGS:
                return  # Python's handlers run between two of its own instructions
            self.saves_from = self.clock.now
            longer = self.job.of(self.machine, What.SAVES_LONGER)
            seconds = self.script.save + (longer.amount if longer else 0)
            self.clock.after(seconds, self._saved, number)

    def _saved(self, number: int) -> None:
        if not self.runs or self.broken_by or self.waits_for_kernel(self._saved, number):
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
        self._say({"script_ended": True})

    def loses_store(self) -> None:
        """What holds the ranks' store is gone; what it saves needs the others."""
        if self.runs and self.is_ready:
            self.lost_store = True
            self.job.watch.loses_store(self)
            self.soon_hears_break()

    def on_end(self) -> None:
        """Break the others' connections."""
        self.job.watch.quiet_from = None
        if self.is_ready and not self.succeeds:
            self.world.breaks(self)
