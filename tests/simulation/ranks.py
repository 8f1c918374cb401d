"""Simulated ranks: they train together, fail, hear each other's end, and save at a stop.

What they tell the launcher, and when, is what launcher/run/rank.py tells: what they raised, or that
their script has ended; and how far they are.
"""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, Any

from launcher.result.causes import Link
from simulation.faults import Fault, What
from simulation.machine import Process
from simulation.plan import AtBreak, AtStop

if TYPE_CHECKING:
    from simulation.keeper import Keeper

STARTS = (0.01, 0.2)  # seconds, until its script has its handlers
BREAKS = (0.01, 2.5)  # seconds, until its next collective fails as another rank has ended
NO_STORE = 300.0  # seconds, for which a rank tries to reach its store (torch's TCPStore)
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
OWN = Link("ValueError", "loss is nan")
ECC = Link("RuntimeError", "CUDA error: uncorrectable ECC error encountered", how="cause")
SECONDARY = Link("RuntimeError", "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
# What a rank says that fails: its exit code, and what it raised; and with which code it ends.
SAYS: dict[What, tuple[int, tuple[Link, ...], int]] = {
    What.RAISES: (1, (OWN,), 1),
    What.LINGERS: (1, (OWN,), 1),
    What.HOOK: (1, (OWN,), 42),
    What.FORGIVEN: (1, (OWN,), 0),
    What.EXITS: (3, (Link(message="3"),), 3),
    What.GPU_FAILS: (1, (Link("ValueError", "no batch"), ECC), 1),
}
ENDS = {What.ENDS: 42, What.KILLED: -signal.SIGKILL, What.CRASHES: -signal.SIGSEGV}


class World:
    """All ranks of one attempt, on all hosts: they train together, or not at all.

    `late` is in no collective any more, where the others wait for it, since `late_from`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: list[Rank] = []
        self.up = 0
        self.broken = False
        self.late: Rank | None = None
        self.late_from = math.inf

    def joined(self, rank: Rank) -> None:
        """A rank's script runs; the last one has all of them begin to train."""
        self.up += 1
        if self.up == self.size and not self.broken:
            rank.job.watch.trains()
            for one in self.ranks:
                one.train()
        elif self.broken:
            rank.hears_break()

    def waits_for(self, rank: Rank | None) -> None:
        """A rank begins no collective any more; None: it is there again."""
        self.late, self.late_from = rank, rank.clock.now if rank else math.inf
        for one in () if rank else self.ranks:
            if one.is_through:
                one.succeed()

    def breaks(self, by: Rank) -> None:
        """A rank's end breaks the others' connections to it."""
        if not self.broken:
            self.broken = True
            for rank in self.ranks:
                if rank is not by and rank.is_ready:
                    rank.hears_break()


class Rank(Process):
    """One rank's process, which its keeper has started.

    Attributes: `store`, who holds the store that it uses; `is_ready`, its script runs and has its
    handlers; `broken_by`, the fault of the plan that it fails with; `secondary`, it fails because
    another one did; `is_dying`, it has said why, and is about to end; `is_through`, it has trained
    to the end, and `succeeds` if the others have; `script_ended`, when it said so.
    """

    is_tied = True

    def __init__(self, keeper: Keeper, attempt: int, port: int) -> None:
        super().__init__(keeper.machine, keeper, attempt)
        self.keeper, self.port, first = keeper, port, self.job.machines[0]
        self.rank, self.local_rank = keeper.rank, keeper.local_rank
        self.store = first.store if port else first.torchrun
        self.world = self.job.world(attempt)
        self.script = self.job.plan.script
        self.waits = self.script.at_break is not AtBreak.GOES_ON  # for others
        self.broken_by: Fault | None = None
        self.broken_at = self.script_ended = math.inf
        self.is_ready = self.is_training = self.is_dying = self.is_saving = False
        self.secondary = self.is_through = self.succeeds = False
        self.upload: Upload | None = None
        self.world.ranks.append(self)
        self.job.watch.starts_script(self)
        self.soon(STARTS, self._get_ready)

    def _say(self, **message: Any) -> None:
        if self.script.is_python:
            self.keeper.relays(message)

    def hears(self, request: dict[str, Any]) -> None:
        """Say how far it is, and where (launcher/watch/in_rank.py)."""
        if self.is_held or not self.is_ready or not self.job.plan.watch or "signal" in request:
            return
        world, where = self.world, [["", ['  File "train.py", line 7 in step'], False]]
        stands = world.up == world.size and not world.broken and world.late_from < self.clock.now
        if not stands or not (self.waits or self is world.late):
            self._say(**request, **({"threads": where} if "stacks" in request else {}))
            return
        begun = [6, 0] if self is world.late else [7, 7, "all_reduce"]
        group = [f"0-{world.size - 1}" if world.size > 1 else "0", 0, "", *begun]
        still = self.clock.now - world.late_from
        self._say(**{**request, "unchanged": still, "threads": where, "groups": [group]})

    # What it does by itself

    def _get_ready(self) -> None:
        if self.is_dying:
            return
        self.is_ready = True
        if self.script.upload:
            self.upload = Upload(self)
            self.job.watch.uploads.append(self.upload)
        if self.job.plan.watch:
            self._say(watch=0)
        if self.store and self.store.runs:
            self.world.joined(self)
        else:
            self.clock.after(NO_STORE, self._misses_store)

    def _misses_store(self) -> None:
        if self.runs and not (self.is_dying or self.is_saving or self.broken_by):
            self._raise(1, (SECONDARY,), 1)

    def train(self) -> None:
        """Train to the end, if nothing comes between."""
        self.is_training = True
        longer = self.job.of(self.machine, What.HOST_SLOW)
        self.clock.after(self.script.seconds + (longer.amount if longer else 0), self.succeed)

    def succeed(self) -> None:
        """Be through, if all others are still there."""
        self.is_through = True
        idle = not (self.broken_by or self.secondary or self.is_saving)
        waits = self.waits and (self.world.broken or self.world.late not in (None, self))
        if self.runs and idle and not waits and not self.waits_for_kernel(self.succeed):
            self.succeeds = True
            self._end_script()

    def _end_script(self, later: float = 0.0) -> None:
        """Say that the script has ended; end."""
        self.script_ended = self.clock.now
        self._say(script_ended={})
        self.clock.after(later, self.end, 0)

    # What others do to it

    def _comes_free(self) -> None:
        super()._comes_free()
        if self.runs and self.world.late is self:
            self.world.waits_for(None)

    def get_stuck(self, fault: Fault) -> None:
        """Be held by the kernel, or have what it has started held."""
        process = self.upload if fault.what is What.LEFT_STUCK else self
        if process and process.runs and self.is_ready and not process.is_held:
            self.job.watch.fault(fault, self.machine, self)
            process.hold(fault.amount)
            if process is self and not self.world.late:
                self.world.waits_for(self)

    def fail(self, fault: Fault) -> None:
        """Do what the plan says; a rank can fail once."""
        idle = self.is_ready and not (self.broken_by or self.secondary or self.succeeds)
        if not self.runs or not idle or self.is_held:
            return
        self.broken_by, self.broken_at = fault, self.clock.now
        self.job.watch.fault(fault, self.machine, self)
        if fault.what is What.HANGS:
            self.world.waits_for(self.world.late or self)
            return
        self.world.breaks(self)
        if fault.what in ENDS:
            self.end(ENDS[fault.what])
        elif fault.what is What.LEAVES:
            self.is_dying = True
            self._end_script(later=fault.amount)
        elif fault.what is What.RAISES:  # it fails of what a thread has raised, and cleans up
            self._say(thread={"name": "pin", "end": {"exit_code": 1, "chain": [OWN._asdict()]}})
            self.clock.after(fault.amount, self._raise, *SAYS[fault.what])
        else:
            self._raise(*SAYS[fault.what], fault.amount)

    def hears_break(self) -> None:
        """Fail in its next collective, as another rank's end has broken the connection."""
        if self.waits:
            self.soon(BREAKS, self._fails_of_break)
        elif not self.is_training:
            self.train()

    def _fails_of_break(self) -> None:
        if not self.runs or self.broken_by or self.is_dying or self.is_saving:
            return
        is_deaf = self.script.at_break in (AtBreak.WAITS, AtBreak.GOES_ON)
        if is_deaf or self.waits_for_kernel(self._fails_of_break):
            return
        self.secondary = True
        if self.script.at_break is AtBreak.RAISES:
            self._raise(1, (SECONDARY,), 1)
        elif self.script.at_break is AtBreak.EXITS:
            self._raise(1, (Link(message="1"), SECONDARY._replace(how="context")), 1)
        else:
            self.end(-signal.SIGABRT)

    def _raise(self, said: int, chain: tuple[Link, ...], code: int, later: float = 0.0) -> None:
        """Say what was raised, and end `later` with a code, which the rank may not know itself."""
        if self.runs and not self.waits_for_kernel(self._raise, said, chain, code, later):
            self.is_dying = True
            links = [link._asdict() for link in chain]
            broken = "an uncorrectable ECC error" if ECC.message in str(links) else ""
            clues = {"facts": [], "counted": [], "broken": broken}
            self._say(end={"exit_code": said, "chain": links, **clues})
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
        does = self.broken_by.what if self.broken_by else None
        if does is What.LINGERS or how is AtStop.IGNORES or number not in STOPS:
            return
        if how is AtStop.DIES and number == signal.SIGINT and self.script.is_python:
            self._raise(-number, (Link("KeyboardInterrupt"),), -number)
        elif how is AtStop.DIES:
            self.end(-number)
        elif not self.is_saving and does is not What.HANGS:
            # Python's handlers run between two of its own instructions.
            self.is_saving = True
            longer = self.job.of(self.machine, What.SAVES_LONGER)
            seconds = self.script.save + (longer.amount if longer else 0)
            self.clock.after(seconds, self._saved, number)

    def _saved(self, number: int) -> None:
        if not self.runs or self.broken_by or self.waits_for_kernel(self._saved, number):
            return
        code = 128 + number
        if self.script.at_stop is AtStop.FAILS:
            self._raise(1, (Link("OSError", "no space left on device"),), 1)
        elif self.script.save_code:
            self._raise(code, (Link(message=str(code)),), code)
        else:
            self._end_script()

    def loses_store(self) -> None:
        """What holds the ranks' store is gone; what it saves needs the others."""
        if self.runs and self.is_ready:
            self.job.watch.loses_store(self)
            self.soon(BREAKS, self._fails_of_break)

    def on_end(self) -> None:
        """Break the others' connections."""
        self.job.watch.quiet_from = None
        if self.is_ready and not self.succeeds:
            self.world.breaks(self)


class Upload(Process):
    """What a rank has started in its own group: it ends by itself in a while."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.machine, rank, rank.attempt)
        self.rank = rank
        self.clock.after(rank.script.upload, self.end, 0)

    def on_signal(self, number: int) -> None:
        """End, or go on."""
        if not self.rank.script.upload_ignores:
            self.end(-number)
