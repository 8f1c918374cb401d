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

from simulation.faults import RANKS, Fault, What  # noqa: E402
from simulation.plan import AtBreak, AtStop, Plan, read  # noqa: E402

TRAINS_FROM = 2.5  # seconds after its start, at which a simulated job trains at the latest


class Rank:
    """One rank; `fault` is what goes wrong with it, in its first attempt alone."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan, self.script = plan, plan.script
        self.rank = int(os.environ["RANK"])
        self.attempt = folder / os.environ["MASTER_PORT"]  # of each attempt another one
        self.attempt.mkdir(exist_ok=True)
        self.saves = False
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        host, local_rank = divmod(self.rank, plan.nproc)
        of_it = {one.what: one for one in plan.faults if one.host == host}
        own = [one for what, one in of_it.items() if what in RANKS and one.local_rank == local_rank]
        self.fault = own[0] if own and is_first else None
        self.seconds = self.script.seconds
        if What.HOST_SLOW in of_it:
            self.seconds += of_it[What.HOST_SLOW].amount
        if is_first and plan.max_restarts:
            self.seconds = 60  # on a busy machine, too, the fault ends this attempt
        how = self.script.at_stop
        for number in (signal.SIGTERM, signal.SIGINT):
            if how is not AtStop.DIES:
                signal.signal(number, signal.SIG_IGN if how is AtStop.IGNORES else self.save)

    def save(self, number: int, _: Any) -> None:
        """Save, and end."""
        if self.saves:
            os._exit(99)  # it has heard a stop twice
        self.saves = True
        time.sleep(self.script.save)
        raise SystemExit(128 + number)

    def meet(self) -> None:
        """Wait until all ranks have come so far."""
        (self.attempt / f"is-up-{self.rank}").touch()
        while len(list(self.attempt.glob("is-up-*"))) < self.plan.hosts * self.plan.nproc:
            time.sleep(0.02)

    def run(self) -> None:
        """Train until the end, a fault, or another rank's end."""
        self.meet()
        print("training", flush=True)
        started, broken = time.monotonic(), self.attempt / "broken"
        while (now := time.monotonic()) - started < self.seconds:
            time.sleep(0.02)
            if self.fault and now - started > self.fault.at - TRAINS_FROM:
                broken.touch()
                fail(self.fault)
            # exists() handles an exception, which would stand behind that of a stop meanwhile.
            if os.access(broken, os.F_OK) and self.script.at_break is AtBreak.EXITS:
                try:
                    raise RuntimeError(
                        "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
                    )
                except RuntimeError:
                    sys.exit(1)


def fail(fault: Fault) -> None:
    """Fail as the plan says."""
    what = fault.what
    if what in (What.EXITS, What.LEAVES):
        sys.exit(3 if what is What.EXITS else 0)
    if what is What.ENDS:
        os._exit(42)
    if what is What.FORGIVEN:
        sys.excepthook = lambda *_: (time.sleep(fault.amount), os._exit(0))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(fault.amount)  # it cleans up
    raise ValueError("loss is nan")


if __name__ == "__main__":
    Rank(Path(sys.argv[1]), read(sys.argv[2])).run()
