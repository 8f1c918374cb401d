"""A script for real ranks that does what a simulated rank does: real_rank.py FOLDER PLAN.

The ranks of all hosts share a folder, and know by files in it when all of them run, and when one of
them has broken the connection between them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])

from simulation.plan import AtBreak, AtStop, Fault, Plan, What, read  # noqa: E402

TRAINS_FROM = 2.5  # seconds after its start, at which a simulated job trains at the latest


class Rank:
    """One rank."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan = plan
        self.script = plan.script
        self.rank = int(os.environ["RANK"])
        self.is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        self.attempt = folder / os.environ["MASTER_PORT"]  # of each attempt another one
        self.attempt.mkdir(exist_ok=True)
        self.saves = 0
        how = self.script.at_stop
        for number in (signal.SIGTERM, signal.SIGINT):
            if how is AtStop.IGNORES:
                signal.signal(number, signal.SIG_IGN)
            elif how is not AtStop.DIES:
                signal.signal(number, self.save)
        self.fault = self.own_fault()

    def own_fault(self) -> Fault | None:
        """Return what goes wrong with this rank, in its first attempt alone."""
        if not self.is_first:
            return None
        for fault in self.plan.faults:
            number = fault.host * self.plan.nproc + fault.local_rank
            if number == self.rank and fault.what.name in OWN:
                return fault
        return None

    def save(self, number: int, _: Any) -> None:
        """Save, and end."""
        if self.saves:
            os._exit(99)  # it has heard a stop twice
        self.saves = number
        time.sleep(self.script.save)
        if self.script.at_stop is AtStop.FAILS:
            raise OSError("no space left on device")
        raise SystemExit(128 + number if self.script.save_code else 0)

    def meet(self, where: str) -> None:
        """Wait until all ranks have come so far."""
        (self.attempt / f"{where}-{self.rank}").touch()
        while len(list(self.attempt.glob(f"{where}-*"))) < self.plan.hosts * self.plan.nproc:
            time.sleep(0.02)

    def run(self) -> None:
        """Train until the end, a fault, or another rank's end."""
        self.meet("is-up")
        print("training", flush=True)
        self.meet("trains")
        started = time.monotonic()
        broken = self.attempt / "broken"
        longer = [f.amount for f in self.plan.faults if f.what is What.HOST_SLOW]
        slow = bool(longer) and any(
            f.what is What.HOST_SLOW and f.host == self.rank // self.plan.nproc
            for f in self.plan.faults
        )
        seconds = self.script.seconds + (longer[0] if slow else 0)
        if self.is_first and self.plan.max_restarts:
            seconds = 60  # on a busy machine, too, the fault ends this attempt
        while time.monotonic() - started < seconds:
            time.sleep(0.02)
            if self.fault and time.monotonic() - started > self.fault.at - TRAINS_FROM:
                broken.touch()
                fail(self.fault)
            # exists() handles an exception, which would stand behind that of a stop meanwhile.
            if os.access(broken, os.F_OK) and self.script.at_break is not AtBreak.GOES_ON:
                self.hear_break()

    def hear_break(self) -> None:
        """Do what the script does when another rank has broken the connection."""
        try:
            if self.script.at_break is AtBreak.ABORTS:
                os.abort()
            while self.script.at_break is AtBreak.WAITS:
                time.sleep(1)
            raise RuntimeError("[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        except RuntimeError:
            if self.script.at_break is AtBreak.EXITS:
                sys.exit(1)
            raise


OWN = ("RAISES", "EXITS", "ENDS", "KILLED", "CRASHES", "HOOK", "FORGIVEN", "LEAVES")


def fail(fault: Fault) -> None:
    """Fail as the plan says."""
    what = fault.what
    if what is What.EXITS:
        sys.exit(3)
    if what is What.LEAVES:
        sys.exit(0)
    if what is What.ENDS:
        os._exit(42)
    if what in (What.KILLED, What.CRASHES):
        os.kill(os.getpid(), signal.SIGKILL if what is What.KILLED else signal.SIGSEGV)
    if what in (What.HOOK, What.FORGIVEN):
        code = 42 if what is What.HOOK else 0

        def hook(*_: Any) -> None:
            time.sleep(fault.amount)
            os._exit(code)

        sys.excepthook = hook
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(fault.amount)  # it cleans up
    raise ValueError("loss is nan")


if __name__ == "__main__":
    Rank(Path(sys.argv[1]), read(sys.argv[2])).run()
