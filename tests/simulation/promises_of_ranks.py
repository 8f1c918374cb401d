"""What is promised to ranks, and to what they have started: what they hear, and their time."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator

from simulation.facts import (
    HELD,
    LOSSES,
    OF_TORCHRUN,
    PAUSES,
    ended,
    has,
    launchers,
    lost,
    planned,
    promise,
    seconds_of,
)
from simulation.launcher import Launcher
from simulation.machine import Machine
from simulation.plan import AtStop, What
from simulation.ranks import STOPS, Rank
from simulation.watch import Watch


def launcher_of(machine: Machine) -> Launcher:
    """Return the launcher of a host whose torchrun was started."""
    assert machine.launcher
    return machine.launcher


@promise("Only each rank's own process gets the stop, once")
def hears_once(watch: Watch) -> Iterator[str]:
    """As any signal that is to end it; but the kernel's stop comes if the launcher is killed."""
    killed = {one.machine for one in has(watch, What.LAUNCHER_KILLED, What.HOST_KILLED)}
    for rank in watch.ranks:
        stops = [number for _, number in rank.heard if number in STOPS]
        if len(stops) > 1 and rank.machine not in killed:
            yield f"rank {rank.rank} (pid {rank.pid}) hears {rank.heard}"


@promise("every rank receives SIGTERM once and has 100 s to save")
def stop_reaches_ranks(watch: Watch) -> Iterator[str]:
    """Within a second, whatever torchrun does; or when it has said that it runs."""
    pauses = seconds_of(watch, *PAUSES)
    for rank in watch.ranks:
        launcher = launcher_of(rank.machine)
        by = launcher.stopping_since + 1 + pauses
        there = rank.let_go_at < launcher.stopping_since < math.inf and launcher.ended_at > by
        if there and (rank.ended is None or rank.ended > by):
            if not any(number in STOPS and at <= by for at, number in rank.heard):
                yield f"rank {rank.rank} (pid {rank.pid}) has heard {rank.heard}"


@promise("The rank and what it started have `--launcher-grace` until SIGKILL")
def has_its_grace(watch: Watch) -> Iterator[str]:
    """Or the failure grace, after a failure. The third Ctrl-C kills at once.

    So does System.end_all here, for which a launcher waits that was stopped after its own error.
    """
    late = has(watch, What.LAUNCHER_FAILS) and has(watch, What.LAUNCHER_STOPS)
    if late or any(len(launcher.stops) >= 3 for launcher in launchers(watch)):
        return
    for rank in watch.ranks:
        killed = [at for at, number in rank.heard if number == signal.SIGKILL]
        if killed and rank.let_go_at < math.inf:
            since, grace = _grace(watch, rank)
            if since is None and not _may_be_unheard(watch, rank):
                yield f"rank {rank.rank} (pid {rank.pid}) is killed without having heard anything"
            if since is not None and killed[0] < since + grace - 0.02:
                yield f"rank {rank.rank} (pid {rank.pid}) is killed {killed[0] - since:.2f} s later"


def _grace(watch: Watch, rank: Rank) -> tuple[float | None, float]:
    """Return since when a rank is to end, None if it does not know, and how long it has."""
    launcher, plan = launcher_of(rank.machine), watch.job.plan
    heard = [at for at, number in rank.heard if number in STOPS]
    if heard and launcher.stopping_since <= heard[0]:
        return heard[0], plan.grace
    # One that has said what it raised is ending by itself.
    return heard[0] if heard else rank.broken_at, plan.failure_grace


def _may_be_unheard(watch: Watch, rank: Rank) -> bool:
    """Tell whether its host was killed, or its launcher: torchrun ends its ranks then."""
    return bool(has(watch, *LOSSES, What.RUNNER_KILLED)) or rank.secondary or rank.is_dying


@promise("Processes that outlive their rank, such as an upload, have the rest of that time")
def uploads_go_on(watch: Watch) -> Iterator[str]:
    """And hear nothing before its last 5 s, if their rank handles the stop."""
    handles = watch.job.plan.script.at_stop in (AtStop.SAVES, AtStop.FAILS)
    thrice = any(len(launcher.stops) >= 3 for launcher in launchers(watch))
    if not handles or thrice:
        return
    grace = watch.job.plan.grace
    for helper in watch.helpers:
        since = launcher_of(helper.machine).stopping_since
        first = helper.heard[0][0] - since if helper.heard else math.inf
        if 0 < first < grace - min(5, grace / 4) - 0.02:
            yield f"process {helper.pid} hears {helper.heard}, stopped at {since:.3f} s"


@promise("then its process group gets the signal, so that the program can save")
def wrapped_programs_hear(watch: Watch) -> Iterator[str]:
    """What a rank has started that dies of the stop without handling it."""
    script = watch.job.plan.script
    if script.at_stop is not AtStop.DIES or script.upload_ignores or lost(watch):
        return
    for helper in watch.helpers:
        launcher, rank = launcher_of(helper.machine), helper.rank
        since = launcher.stopping_since
        unknown = rank.broken_by or rank.secondary or helper.held_until > -math.inf
        if rank.ended is None or unknown or launcher.ended_at <= since + 2:
            continue
        of_it = rank.exit_code in (-signal.SIGTERM, -signal.SIGINT)
        if of_it and since <= rank.ended < since + 1 and rank.started + 1 < since:
            by = since + 2 + seconds_of(watch, *PAUSES)
            if helper.ended is None or helper.ended > by:
                yield f"process {helper.pid} of rank {rank.rank} has heard {helper.heard}"


@promise("one that becomes known later does not run")
def late_ranks_end(watch: Watch) -> Iterator[str]:
    """Once it has said its pid, within a second."""
    pauses = seconds_of(watch, *PAUSES)
    for rank in watch.ranks:
        by = rank.said_at + 1 + pauses
        if math.isinf(rank.let_go_at) and by < (rank.ended or math.inf):
            yield f"rank {rank.rank} (pid {rank.pid}) ends at {rank.ended}, {rank.said_at:.3f} s"


@promise("The launcher alone reaps ranks")
def launcher_reaps(watch: Watch) -> Iterator[str]:
    """All that have ended by its own end."""
    for launcher in ended(watch):
        for rank in watch.ranks:
            is_ours = rank.machine is launcher.machine and rank.ended is not None
            if is_ours and rank.ended < launcher.ended_at and math.isinf(rank.reaped_at):
                yield f"rank {rank.rank} (pid {rank.pid}) ends at {rank.ended:.3f} s"


@promise("then kills after the grace what is left of them")
def ends_without_launcher(watch: Watch) -> Iterator[str]:
    """Of a host's ranks when its launcher was killed; if torchrun can."""
    killed = {one.machine: one.time for one in has(watch, What.LAUNCHER_KILLED)}
    if planned(watch, *OF_TORCHRUN, *HELD) or len(has(watch, *LOSSES)) > 1:
        return
    for rank in [one for one in watch.ranks if one.machine in killed]:
        at = killed[rank.machine]
        by, torchrun = at + watch.job.plan.grace + 2, rank.torchrun
        can = torchrun.ended is None or torchrun.ended > at
        if can and rank.started < by and (rank.ended is None or rank.ended > by):
            yield f"rank {rank.rank} (pid {rank.pid}) ends at {rank.ended}, killed at {at:.3f} s"


@promise("Ctrl-C three times within 2 s kills the job at once")
def third_interrupt_kills(watch: Watch) -> Iterator[str]:
    """All ranks of that host."""
    for one in has(watch, What.CTRL_C_THRICE):
        launcher = launcher_of(one.machine)
        at = [at for at, number in launcher.stops if number == signal.SIGINT]
        thrice = [third for first, third in zip(at, at[2:]) if third - first < 2]
        if not thrice or planned(watch, *PAUSES) or launcher.ended_at < thrice[0]:
            continue
        for rank in watch.ranks:
            if rank.machine is one.machine and rank.started < thrice[0]:
                if rank.ended is None or rank.ended > thrice[0] + 0.1:
                    yield f"rank {rank.rank} (pid {rank.pid}) ends at {rank.ended}"


@promise("The store goes last")
def store_goes_last(watch: Watch) -> Iterator[str]:
    """No rank loses the store while it has time, unless what keeps it was broken."""
    if has(watch, *LOSSES, *OF_TORCHRUN) or planned(watch, *PAUSES, What.DELAY):
        return
    if any(len(launcher.stops) >= 3 for launcher in launchers(watch)):
        return
    for at, rank in watch.lost_store:
        if rank.killed_at <= at:
            continue  # the kernel holds it
        keeper = rank.torchrun.store.keeper
        if all(one.torchrun is not keeper for one in rank.world.ranks):
            continue  # the host that was to keep it has not started its ranks, nor has any trained
        yield f"rank {rank.rank} (pid {rank.pid}) loses its store at {at:.3f} s"
