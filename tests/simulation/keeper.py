"""Simulated stubs and keepers, which behave as launcher/run/stub.py and keeper.py do."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, Any

from simulation.machine import Process
from simulation.ranks import Rank
from simulation.system import Pipe

if TYPE_CHECKING:
    from simulation.torchrun import Torchrun

# In seconds, as keeper.py has them.
STUCK, AGAIN, LEFTOVERS = 5.0, 0.2, 5.0
BOOT = (0.01, 0.05)  # until a stub has forked its keeper, and that has connected
TELLS = (0.0005, 0.005)  # until a stub hears its keeper


class Stub(Process):
    """What torchrun starts for a rank: it ends as its keeper says, which it starts."""

    def __init__(self, torchrun: Torchrun, local_rank: int) -> None:
        super().__init__(torchrun.machine, torchrun)
        self.local_rank = local_rank
        self.keeper: Keeper | None = None
        self.soon((BOOT[0] + torchrun.slowness, BOOT[1] + torchrun.slowness), self._fork)

    def _fork(self) -> None:
        self.keeper = Keeper(self)

    def on_signal(self, number: int) -> None:
        """Tell the keeper; while Python starts, nothing handles it."""
        if self.keeper:
            self.keeper.hears_stub(number)
        else:
            self.end(-number)

    def child_ended(self, child: Process) -> None:
        """End after a keeper that was killed; the kernel has sent its script SIGTERM."""
        if child.exit_code:
            self.soon(TELLS, self.end, 1)

    def on_end(self) -> None:
        """Have the keeper notice."""
        if self.keeper:
            self.keeper.hears_stub(signal.SIGKILL)


class Keeper(Process):
    """One rank's keeper. Attributes: `script`, the process of the last attempt, also if ended."""

    adopts = True

    def __init__(self, stub: Stub) -> None:
        super().__init__(stub.machine, stub)
        self._stub, plan = stub, self.job.plan
        self.local_rank, group_rank = stub.local_rank, stub.machine.number
        self.rank = group_rank * plan.nproc + self.local_rank
        self.script: Rank | None = None
        self.hangs = self.has_said_end = False  # hangs: it is suspended
        # Of the current end.
        self._is_ending, self._number = False, 0
        self._signal, self._response = 0, ""
        self._deadline = self._leftovers_at = self._stuck_at = math.inf
        self.machine.keepers.append(self)
        self._pipe = Pipe(self.machine, self._hears, self._loses_launcher)
        hello = {"rank": self.rank, "local_rank": self.local_rank, "group_rank": group_rank}
        hello |= {"nproc": plan.nproc}
        self._pipe.say({"hello": hello})
        if not self._pipe.is_open:
            self.end(1)

    @property
    def acts(self) -> bool:
        """Whether it does anything any more."""
        return self.runs and not self.hangs

    def on_signal(self, number: int) -> None:
        """Ignore all that stops."""

    def hears_stub(self, number: int) -> None:
        """Say that torchrun, or somebody else, has signalled or killed the stub."""
        if self.acts:
            self._pipe.say({"stub": {"number": number}})

    # The launcher's commands.

    def _hears(self, message: dict[str, Any]) -> None:
        if not self.acts:
            return
        if "run" in message:
            self._run(message["run"])
        elif "end" in message:
            self._end(**message["end"])
        elif "leave" in message:
            self._leave(message["leave"])
        elif self.script and self.script.runs:
            self.script.hears(message["ask"])

    def _loses_launcher(self) -> None:
        if self.acts and not self._is_ending:
            self._end(0, signal.SIGTERM, self.job.plan.grace, waits=False, at_once=False)

    def _run(self, start: dict[str, Any]) -> None:
        self._is_ending = self.has_said_end = False
        self._signal, self._response = 0, ""
        port = int(start["environ"].get("MASTER_PORT", 0))
        attempt = int(start["environ"]["TORCHELASTIC_RESTART_COUNT"]) + 1
        self.script = Rank(self, attempt, port)
        self._pipe.say({"runs": {"pid": self.script.pid}})

    def _end(
        self, number: int, signal_number: int, grace: float, waits: bool, at_once: bool
    ) -> None:
        now, script = self.clock.now, self.script
        deadline = now if at_once else now + grace
        if self._is_ending and not at_once:
            deadline = max(deadline, self._deadline)
        self._number, self._is_ending = number, True
        self._deadline, self._stuck_at = deadline, deadline + STUCK
        self._leftovers_at = deadline - min(LEFTOVERS, grace / 4) if waits else now
        if script and script.runs and not self._signal and (waits or not self.has_said_end):
            self._signal, self._response = signal_number, script.response(signal_number)
            script.signal(signal_number)
        for at in (now, self._leftovers_at, deadline):
            self.clock.at(at, self._look)

    def _leave(self, code: int) -> None:
        for process in self.below():
            process.signal(signal.SIGKILL)
        self._stub.soon(TELLS, self._stub.end, code)
        self.end(0)

    # What happens below.

    def relays(self, message: dict[str, Any]) -> None:
        """Pass on what the script's process says."""
        if self.acts:
            self.has_said_end |= "end" in message
            self._pipe.say(message, b":")

    def child_ended(self, child: Process) -> None:
        """Say how the script has ended; be clear when nothing is left."""
        if self.acts and child is self.script:
            self._pipe.say({"ended": {"exit_code": child.exit_code, "response": self._response}})
        self._look()

    def _look(self) -> None:
        """Clear, if nothing is left; do to what is left what is due."""
        now, left = self.clock.now, self.below()
        if not (self.acts and self._is_ending):
            return
        if not left or now >= self._stuck_at:
            self._clear(len(left))
        elif now >= self._deadline:
            for process in left:
                process.signal(signal.SIGKILL)
            if self._is_ending:  # or else they ended, which has been seen
                self.clock.after(AGAIN, self._look)
        elif now >= self._leftovers_at and not (self.script and self.script.runs):
            for process in left:
                process.signal(signal.SIGTERM)

    def _clear(self, survivors: int) -> None:
        self._is_ending = False
        self._pipe.say({"cleared": {"number": self._number, "survivors": survivors}})
        if not self._pipe.is_open:
            self._leave(1)

    def on_end(self) -> None:
        """Have the launcher notice."""
        self._pipe.close()
