"""What is promised to ranks, and to what they have started: what they hear, and their time.

What a keeper promises by itself is in test_keeper.py, with real ones.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator

from simulation.facts import has, interrupted, promise, seconds_of
from simulation.faults import LOSSES, PAUSES, TORCHRUNS, What
from simulation.launcher import Launcher
from simulation.machine import Machine
from simulation.plan import AtStop
from simulation.ranks import STOPS, Rank
from simulation.watch import Watch

ON_ITS_WAY = 0.02  # s, at most, that a command is


def launcher_of(machine: Machine) -> Launcher:
    """Return the launcher of a host whose torchrun was started."""
    assert machine.launcher
    return machine.launcher


@promise("Only each rank's own process gets the stop, once")
def hears_once(watch: Watch) -> Iterator[str]:
    """As any signal that is to end it; but the kernel's stop comes if its keeper is killed."""
    for rank in watch.ranks:
        stops = [at for at, number in rank.heard if number in STOPS and at < rank.killed_at]
        if len(stops) > 1 and not _has_lost_keeper(rank):
            yield f"rank {rank.rank} (pid {rank.pid}) hears {rank.heard}"


def _has_lost_keeper(rank: Rank) -> bool:
    """Tell whether its keeper was killed, as its host, or hangs."""
    return rank.keeper.hangs or rank.keeper.exit_code not in (None, 0)


@promise("every rank receives SIGTERM once and has 100 s to save")
def stop_reaches_ranks(watch: Watch) -> Iterator[str]:
    """Within a second, whatever torchrun does."""
    pauses = seconds_of(watch, *PAUSES)
    for rank in watch.ranks:
        launcher = launcher_of(rank.machine)
        by = launcher.stopping_since + 1 + pauses
        there = launcher.stopping_since < math.inf and launcher.ended_at > by
        there = there and not _has_lost_keeper(rank)
        if there and (rank.ended > by):
            if not any(number in STOPS and at <= by for at, number in rank.heard):
                yield f"rank {rank.rank} (pid {rank.pid}) has heard {rank.heard}"


@promise("The rank and what it started have `--launcher-grace` until SIGKILL")
def has_its_grace(watch: Watch) -> Iterator[str]:
    """Or the failure grace, after a failure. The third Ctrl-C kills at once."""
    if interrupted(watch):
        return
    for rank in watch.ranks:
        if rank.killed_at < math.inf and not _has_lost_keeper(rank):
            since, grace = _grace(watch, rank)
            if since == math.inf and not rank.is_dying:
                yield f"rank {rank.rank} (pid {rank.pid}) is killed without having heard anything"
            # A rank that the kernel held until it was killed hears of a signal later.
            if since <= rank.killed_at < since + grace - 0.02:
                late = rank.killed_at - since
                yield f"rank {rank.rank} (pid {rank.pid}) is killed {late:.2f} s later"
    for upload in watch.uploads:
        since = launcher_of(upload.machine).stopping_since
        by = since + watch.job.plan.grace - ON_ITS_WAY
        if since + ON_ITS_WAY < upload.killed_at < by and not _has_lost_keeper(upload.rank):
            yield f"process {upload.pid} is killed at {upload.killed_at:.3f} s"


def _grace(watch: Watch, rank: Rank) -> tuple[float, float]:
    """Return since when a rank is to end, infinite if it does not know, and how long it has."""
    launcher, plan = launcher_of(rank.machine), watch.job.plan
    # A stop that comes as the time of another end is up is late: its command is on its way.
    if launcher.stopping_since + ON_ITS_WAY <= rank.killed_at:
        return launcher.stopping_since, plan.grace
    heard = [at for at, number in rank.heard if number in STOPS]
    # One that has said what it raised is ending by itself.
    return heard[0] if heard else rank.broken_at, plan.failure_grace


@promise("Processes that outlive their rank, such as an upload, have the rest of that time")
def uploads_go_on(watch: Watch) -> Iterator[str]:
    """And hear nothing before its last 5 s, if their rank handles the stop."""
    handles = watch.job.plan.script.at_stop in (AtStop.SAVES, AtStop.FAILS)
    thrice = interrupted(watch)
    if not handles or thrice:
        return
    grace = watch.job.plan.grace
    for upload in watch.uploads:
        since = launcher_of(upload.machine).stopping_since
        first = upload.heard[0][0] - since if upload.heard else math.inf
        if _has_lost_keeper(upload.rank):
            continue
        if 0.05 < first < grace - min(5, grace / 4) - 0.02:
            yield f"process {upload.pid} hears {upload.heard}, stopped at {since:.3f} s"


@promise(
    "Ctrl-C three times within 2 s kills the job at once", unless=(*PAUSES, What.LAUNCHER_FAILS)
)
def third_interrupt_kills(watch: Watch) -> Iterator[str]:
    """All ranks of that host."""
    for one in has(watch, What.CTRL_C_THRICE):
        launcher = launcher_of(one.machine)
        at = [at for at, number in launcher.stops if number == signal.SIGINT]
        thrice = [third for first, third in zip(at, at[2:]) if third - first < 2]
        if thrice and launcher.ended_at > thrice[0]:  # or else it is killed in that moment
            ranks = [rank for rank in watch.ranks if rank.machine is one.machine]
            for rank in [rank for rank in ranks if rank.started < thrice[0] < rank.ended - 0.1]:
                if not _has_lost_keeper(rank):
                    yield f"rank {rank.rank} (pid {rank.pid}) ends at {rank.ended}"


@promise("The store goes last", unless=(*PAUSES, What.DELAY))
def store_goes_last(watch: Watch) -> Iterator[str]:
    """No rank loses the store while it has time, unless what keeps it was broken."""
    broken = (*LOSSES, *TORCHRUNS, What.LAUNCHER_FAILS, What.STORE_KILLED)
    if has(watch, *broken) or interrupted(watch):
        return
    for at, rank in watch.lost_store:
        if rank.killed_at > at:  # or else the kernel holds it
            yield f"rank {rank.rank} (pid {rank.pid}) loses its store at {at:.3f} s"
