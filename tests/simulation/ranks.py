"""Simulated ranks: they train together, fail, hear each other's end, and save at a stop.

What they tell the launcher, and when, is what launcher/run/rank.py tells: who they are, before they
wait for go; and what they raised, or that their script has ended.
"""

from __future__ import annotations

import functools
import math
import signal
from typing import TYPE_CHECKING, Any

from launcher.errors import Disposition
from launcher.result.raised import Link
from simulation.machine import Helper, Process
from simulation.pipe import Pipe
from simulation.plan import AtBreak, AtStop, Fault, Moment, What

if TYPE_CHECKING:
    from simulation.starting import Start

NOT_LET_GO = 128 + signal.SIGTERM  # its exit code
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


class Watcher:
    """What answers in a rank how far it is, and where (launcher/watch/in_rank.py)."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._pipe = Pipe(rank.machine, self._hears, folder=rank.folder)
        self._pipe.say(
            {"watch": rank.pid, "rank": rank.rank, "local_rank": rank.local_rank, "signal": 0}
        )

    def close(self) -> None:
        """End with the rank."""
        self._pipe.close()

    def _hears(self, question: dict[str, Any]) -> None:
        rank, where = self._rank, [["step", "train.py", 7]]
        if not rank.runs or rank.is_held:
            return
        if "stacks" in question:
            self._pipe.say({"stacks": question["stacks"], "threads": [["", where]]})
            return
        world = rank.world
        moves = {"poll": question["poll"]}
        still = rank.clock.now - world.late_from
        goes_on = rank.script.at_break is AtBreak.GOES_ON and rank is not world.late
        if still <= 0 or world.up < world.size or world.broken or goes_on:
            self._pipe.say(moves)
            return
        waits = 0 if rank is world.late else 7
        group = {"ranks": f"0-{world.size - 1}", "last": waits or 6, "waits": waits}
        if world.size == 1:
            group["ranks"] = "0"
        if waits:
            group["op"] = "all_reduce"
        self._pipe.say({**moves, "unchanged": still, "calls": where, "groups": [group]})


class Rank(Process):
    """One rank's process: `starter` has forked it.

    Attributes: `said_at`, when it said its pid; `let_go_at`, when the launcher let its script run;
    `broken_by`, the fault of the plan that it fails with; `succeeds`, it has trained to the end;
    `secondary`, it fails because another one did.
    """

    def __init__(self, starter: Start, world: World) -> None:
        super().__init__(starter.machine, starter if isinstance(starter, Process) else None)
        self.folder = starter.folder
        self.starter, self.torchrun = starter, starter.torchrun
        self.world = world
        self.rank, self.local_rank = starter.rank, starter.local_rank
        self.said_at = self.let_go_at = math.inf
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
        self.pipe: Pipe | None = None
        self.watcher: Watcher | None = None
        self.helper: Helper | None = None
        world.ranks.append(self)
        self.job.watch.ranks.append(self)
        starter.after((0.001, 0.01), self._connect)

    # How it becomes a rank

    def _connect(self) -> None:
        if self.starter.dies(Moment.FORKED, self):
            return
        self.pipe = Pipe(self.machine, self._hears, self._is_refused, self.folder, self._let_go)
        if not self.pipe.is_open:
            self.end(NOT_LET_GO)
            return
        self.pipe.say({"rank": self.rank, "local_rank": self.local_rank, "pid": self.pid})
        self.said_at = self.clock.now
        if not self.starter.dies(Moment.SAID, self):
            self.starter.knows()
            self.clock.after(self.job.random.uniform(0, 0.003), self._dies, Moment.KNOWN)

    def _dies(self, moment: Moment) -> None:
        self.starter.dies(moment, self)

    def _let_go(self) -> None:
        self.let_go_at = self.clock.now
        self.job.watch.lets_go(self)

    def _is_refused(self) -> None:
        if not self.is_tied:
            self.end(NOT_LET_GO)

    def _hears(self, message: dict[str, Any]) -> None:
        if self.runs and self.starter.runs:  # it is not the launcher's child yet
            self.clock.after(0.0005, self._hears, message)
        elif self.runs:
            launcher = self.machine.launcher
            self.is_tied = launcher is not None and launcher.runs
            if not self.is_tied:
                self.end(NOT_LET_GO)
            elif not self.starter.dies(Moment.LET_GO, self):
                self.clock.after(self.job.random.uniform(0.01, 0.2), self._get_ready)

    # What it does by itself

    def _get_ready(self) -> None:
        if not self.runs or self.is_dying:
            return
        self.is_ready = True
        self.job.watch.runs_script(self)
        if self.pipe and not self.script.is_python:  # it has executed another program
            self.pipe.close()
            self.pipe = None
        if self.script.upload:
            self.helper = Helper(self, self.script.upload, ignores=self.script.upload_ignores)
            self.job.watch.helpers.append(self.helper)
        if self.job.plan.watch and self.script.is_python:
            self.watcher = Watcher(self)
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
        process = self.helper if fault.what is What.LEFT_STUCK else self
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
            if self.pipe:  # it fails of what a helper thread has raised
                chain = [link._asdict() for link in own]
                self.pipe.say({"thread": "pin", "chain": chain})
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
            if number == signal.SIGINT and self.is_tied and self.script.is_python:
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
        """Break the others' connections, and have who is its parent notice."""
        self.job.watch.quiet_from = None
        if self.is_ready and not self.succeeds:
            self.world.breaks(self)
        assert self.exit_code is not None
        self.starter.fork_ended(self.exit_code)
        if self.pipe:
            self.pipe.close()
        if self.watcher:
            self.watcher.close()
        self.torchrun.rank_ended()
