"""What promises are judged by: facts of one simulated job, and the register of all promises.

A promise bears the words of README.md or docs/ that make it; a test looks whether they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulation.launcher import Launcher
from simulation.machine import Machine
from simulation.plan import What
from simulation.strangers import IMPOSTORS
from simulation.watch import Broken, Happened, Watch

Promise = Callable[[Watch], Iterator[str]]
PROMISES: dict[str, Promise] = {}

STOPS = (What.STOP, What.STOP_ALL, What.CTRL_C, What.CTRL_C_THRICE)
LOSSES = (
    What.LAUNCHER_KILLED, What.HOST_KILLED, What.HOST_VANISHES, What.CUT,
    What.RESET, What.HALF_OPEN, What.STOPS_READING, What.LAUNCHER_STOPS,
)  # fmt: skip
RANK_FAILURES = tuple(What)[: tuple(What).index(What.HANGS)]
HANGS = (What.TORCHRUN_HANGS, What.TORCHRUN_STUCK, What.KEEPER_HANGS)
HELD = (What.STUCK, What.LEFT_STUCK, What.TORCHRUN_STUCK)
KEEPERS = (What.KEEPER_KILLED, What.STUB_KILLED)
OF_TORCHRUN = (What.TORCHRUN_KILLED, What.TORCHRUN_TOLD, What.RUNNER_KILLED, *KEEPERS, *HANGS)
STORES = (What.STORE_FAILS, What.STORE_KILLED, What.STORE_SLOW)
MISCONFIGURED = (
    What.HOST_ABSENT, What.DIFFERS, What.CANNOT_START, What.PORT_TAKEN, What.TOO_FEW_FILES,
    What.NO_TORCHRUN, What.TORCHRUN_FAILS, What.RUNNER_FAILS, What.NO_FOLDER,
)  # fmt: skip
PAUSES = (What.LAUNCHER_PAUSES, What.LAUNCHER_STOPS)
SLOW = (*PAUSES, What.DELAY)


def promise(sentence: str) -> Callable[[Promise], Promise]:
    """Name the function below after the words that it holds; it yields how that is broken."""

    def register(check: Promise) -> Promise:
        PROMISES[sentence] = check
        return check

    return register


def broken(watch: Watch) -> list[Broken]:
    """Return the promises that a job has not kept."""
    found = list(watch.broken)
    for sentence, check in PROMISES.items():
        found += [Broken(sentence, how) for how in check(watch)]
    return found


def launchers(watch: Watch) -> list[Launcher]:
    """Return the launchers that were started."""
    return [machine.launcher for machine in watch.job.machines if machine.launcher]


def ended(watch: Watch) -> list[Launcher]:
    """Return those that have ended with a result."""
    return [one for one in launchers(watch) if one.result is not None]


def has(watch: Watch, *kinds: What) -> list[Happened]:
    """Return the faults of some kinds that took effect."""
    return [one for one in watch.faults if one.fault.what in kinds]


def planned(watch: Watch, *kinds: What) -> bool:
    """Tell whether the plan has a fault of some kinds, whether it took effect or not."""
    return any(fault.what in kinds for fault in watch.job.plan.faults)


def seconds_of(watch: Watch, *kinds: What) -> float:
    """Return how long the faults of some kinds last, all together."""
    return sum(fault.amount for fault in watch.job.plan.faults if fault.what in kinds)


def lost(watch: Watch) -> set[Machine]:
    """Return the hosts whose word cannot be expected to reach the others, or theirs them."""
    # The third Ctrl-C ends a launcher at once, whatever the others know.
    thrice = {one.machine for one in launchers(watch) if len(one.stops) >= 3}
    return {one.machine for one in has(watch, *LOSSES)} | thrice


def impostors(watch: Watch) -> bool:
    """Tell whether somebody connects who knows the job's hosts, and is none of them."""
    return any(f.what is What.STRANGER and f.amount >= IMPOSTORS for f in watch.job.plan.faults)
