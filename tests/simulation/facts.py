"""What promises are judged by: facts of one simulated job, and the register of all promises.

Where a page makes a promise, that bears its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from launcher.result.causes import Result
from simulation.faults import LOSSES, What
from simulation.launcher import Launcher
from simulation.machine import Machine
from simulation.watch import Broken, Happened, Watch

Promise = Callable[[Watch], Iterator[str]]
PROMISES: dict[str, tuple[Promise, tuple[What, ...]]] = {}


def promise(sentence: str, *, unless: tuple[What, ...] = ()) -> Callable[[Promise], Promise]:
    """Name the function below after the words that it holds; it yields how that is broken.

    `unless` the plan has one of these faults, whether that took effect or not.
    """

    def register(check: Promise) -> Promise:
        PROMISES[sentence] = check, unless
        return check

    return register


def broken(watch: Watch) -> list[Broken]:
    """Return the promises that a job has not kept."""
    found = list(watch.broken)
    for sentence, (check, unless) in PROMISES.items():
        if not planned(watch, *unless):
            found += [Broken(sentence, how) for how in check(watch)]
    return found


def launchers(watch: Watch) -> list[Launcher]:
    """Return the launchers that were started."""
    return [machine.launcher for machine in watch.job.machines if machine.launcher]


def ended(watch: Watch) -> list[tuple[Launcher, Result]]:
    """Return those that have ended with a result."""
    return [(one, one.result) for one in launchers(watch) if one.result is not None]


def has(watch: Watch, *kinds: What) -> list[Happened]:
    """Return the faults of some kinds that took effect."""
    return [one for one in watch.faults if one.fault.what in kinds]


def planned(watch: Watch, *kinds: What) -> bool:
    """Tell whether the plan has a fault of some kinds, whether it took effect or not."""
    return any(fault.what in kinds for fault in watch.job.plan.faults)


def seconds_of(watch: Watch, *kinds: What) -> float:
    """Return how long the faults of some kinds last, all together."""
    return sum(fault.amount for fault in watch.job.plan.faults if fault.what in kinds)


def interrupted(watch: Watch) -> set[Machine]:
    """Return the hosts that had Ctrl-C three times: a launcher ends at once then."""
    return {one.machine for one in launchers(watch) if len(one.stops) >= 3}


def lost(watch: Watch) -> set[Machine]:
    """Return the hosts whose word cannot be expected to reach the others, or theirs them."""
    return {one.machine for one in has(watch, *LOSSES)} | interrupted(watch)
