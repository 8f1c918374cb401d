"""What this host reports, and which ranks it has save, when a rank or torchrun failed. Pure."""

from __future__ import annotations

import math
import signal

from launcher.peers.messages import Failed
from launcher.result.causes import Cause, Failure, by_foreign_signal, of_rank, of_torchrun
from launcher.run import ranks
from launcher.run.events import Actions, Report, SignalRanks
from launcher.run.state import (
    CONFIRM_FAILURE_SECONDS,
    MARGIN_SECONDS,
    Failing,
    Running,
    State,
    Step,
)


def count(state: State, now: float, *, everything: bool = False) -> Step:
    """Report the ranks whose failures count now."""
    if not isinstance(state.phase, (Running, Failing)):
        return state, ()
    began, job = state.times.attempt, state.job
    patience = -math.inf if everything else CONFIRM_FAILURE_SECONDS
    counting, wait = ranks.to_count(_by_themselves(state), now - began, patience)
    actions: Actions = ()
    for rank in counting:
        known = {**state.ranks, rank.pid: rank._replace(counts=True)}
        state = state._replace(ranks=known)
        assert rank.failure
        age = now - began - rank.failure.time
        state, more = fail(state, of_rank(rank.failure, job.current_host), now, age)
        actions += (*report_ends(state, now), *more)
    return state._replace(count_at=began + wait), actions


def _by_themselves(state: State) -> ranks.Ranks:
    """Return the ranks that end by themselves, if they do."""
    signalled = state.phase.signalled if isinstance(state.phase, Failing) else ()
    return {pid: rank for pid, rank in state.ranks.items() if pid not in signalled}


def report_ends(state: State, now: float, *, only_first: bool = False) -> Actions:
    """Report which ranks have ended with 0: that may break others' collective.

    With `only_first` nothing is if others have before, or if all have, which is reported with this
    host's success. Where torchrun may run again in this attempt, only what belongs to a failure is.
    """
    if only_first and state.program.name:
        return ()
    ends = ranks.ended_well(_by_themselves(state), state.attempt, now - state.times.attempt)
    is_known = only_first and (state.has_succeeded or any(len(one.ages) > 1 for one in ends))
    return () if is_known else tuple(map(Report, ends))


def fail(state: State, failure: Failure, now: float, age: float = 0.0) -> Step:
    """Report a failure, which counts, and have the other ranks save; the coordinator decides."""
    phase = state.phase
    report: Actions = (Report(Failed(state.attempt, failure, round(age, 3))),)
    if isinstance(phase, Running) and phase.foreign_signal and failure.may_restart:
        # There is no restart after somebody else has ended torchrun.
        report += (Report(Failed(state.attempt, of_foreign_signal(state, phase, now))),)
    if not isinstance(phase, Failing):
        phase = Failing(now + failure.cause.patience + MARGIN_SECONDS)
    if failure.cause is Cause.OWN and not phase.signalled:
        pids = tuple(rank.pid for rank in state.alive if not (rank.failure or rank.is_refused))
        phase = phase._replace(signalled=frozenset(pids))
        report += (SignalRanks(pids, signal.SIGTERM),) if pids else ()
    return state._replace(phase=phase), report


def of_torchrun_here(
    state: State,
    returncode: int | None,
    error: str,
    now: float,
    program: str = "torchrun",
    oom: str = "",
) -> Failure:
    """Return why this host has failed if its torchrun has, or the program that runs it."""
    job, seconds = state.job, now - state.times.attempt
    where = (job.cluster.hosts, job.current_host, job.endpoint)
    return of_torchrun(returncode, error, *where, seconds, program, oom)


def of_foreign_signal(state: State, running: Running, now: float) -> Failure:
    """Return why this host has failed if somebody else has sent its torchrun a signal."""
    return of_torchrun_here(state, None, by_foreign_signal(running.foreign_signal), now)
