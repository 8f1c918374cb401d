"""Rules for the end: what is left of the job ends, and the other hosts are waited for."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

from launcher.events import Decided, Log, Succeeded, Tell, Time
from launcher.result.causes import Failure, Result, in_order
from launcher.result.causes import stopped as stopped_by
from launcher.result.failure_text import of_ranks, of_torchrun
from launcher.run.events import (
    Answer,
    ChildEnded,
    Look,
    RankStarted,
    Remaining,
    SignalProcesses,
    TorchrunAsks,
    TorchrunEnded,
    TorchrunGone,
    TorchrunStarts,
    Why,
)
from launcher.run.ranks import with_times
from launcher.run.state import MARGIN, P, State, Step, enter, tell_certain, when

_AGAIN = 1.0  # seconds, until what was killed is looked for again

_RUNS = (P.RUNNING, P.FAILING, P.HOLDING, P.ENDING, P.STOPPING, P.RESTARTING, P.CLEARING, P.KILLING)


# Torchrun ends.


@when(*_RUNS, on=TorchrunEnded, to=(P.DRAINING,))
def _torchrun_ended(state: State, event: TorchrunEnded, now: float) -> Step:
    """Tell the other hosts why if it failed; look for what the ranks left behind."""
    state, actions = tell_certain(state, now, everything=True)
    by = state.leftovers_by
    # Ranks that still run may not have been told to end yet.
    untold = not state.closing or any(rank.pid not in state.told for rank in state.alive)
    hear_now = untold and not (state.stop_signal or state.phase is P.KILLING)
    state = state._replace(
        returncode=event.returncode,
        ended=now,
        torchrun_error=event.error or state.torchrun_error,
        leftovers_by=now + state.job.failure_grace if hear_now or math.isinf(by) else by,
        killed_at=math.inf,
    )
    if event.returncode and not state.stop_signal:
        failure = _failure(state, event, now)
        state = state._replace(failure=failure)
        if state.result is None:
            actions += (Tell(failure),)
    return enter(state, P.DRAINING), (*actions, Look())


def _failure(state: State, event: TorchrunEnded, now: float) -> Failure:
    job, seconds = state.job, now - state.started
    from_ranks = [failure for pid in state.failed if (failure := state.ranks[pid].failure)]
    from_torchrun = () if state.closing is Why.ERROR else with_times(event.failures, state.ranks)
    closed = state.closing_at - state.started
    if state.closing is Why.STOP and event.program != "torchrun":
        # The kernel has stopped torchrun (agent.py), since that program was killed.
        from_ranks = [failure for failure in from_ranks if failure.time < closed]
    failures = in_order(from_ranks, from_torchrun, closed)
    if failures:
        return of_ranks(failures, job.current_host, seconds)
    error = state.torchrun_error
    return of_torchrun(
        event.returncode, error, job.hosts, job.current_host, job.endpoint, seconds, event.program
    )


# What ranks left behind.


@when(P.DRAINING, P.CLEARING, on=ChildEnded)
def _child_ended(state: State, event: ChildEnded, now: float) -> Step:
    """Look again for what is left."""
    return state, (Look(behind=state.phase is P.CLEARING),)


@when(P.DRAINING, on=RankStarted)
def _started_while_draining(state: State, event: RankStarted, now: float) -> Step:
    """Look for what is left: a rank that torchrun started just before its end is told to end."""
    return state, (Look(),)


@when(P.DRAINING, P.CLEARING, P.KILLING, on=Time)
def _look_again(state: State, event: Time, now: float) -> Step:
    """Look again for what is left."""
    return state._replace(deadline=math.inf), (Look(behind=state.phase is P.CLEARING),)


@when(P.DRAINING, on=Remaining, to=(P.WAITING, P.DONE))
def _drain(state: State, event: Remaining, now: float) -> Step:
    """End what is left with SIGTERM, and with SIGKILL when its time is over; then go on.

    After a stop, what ranks have left (an upload, say) has the rest of the grace, and SIGTERM comes
    only near its end.
    """
    left = [pid for pid, _ in event.processes]
    if not left:
        return _drained(state)
    by = state.leftovers_by
    if now >= state.killed_at + MARGIN:
        state, actions = _drained(state)
        line = (
            f"{len(left)} processes of the job have survived SIGKILL for {MARGIN:g} s "
            "(stuck in the kernel); leaving them."
        )
        return state, (Log(line), *actions)
    if now >= by:
        return _kill_left(state, left, now)
    tell_at = by - min(MARGIN, state.job.grace / 4) if state.stop_signal else now
    ranks = {rank.pid for rank in state.alive}
    if now < tell_at:
        # Ranks that run, and have not been told: torchrun was killed before it could do so.
        untold = [pid for pid in left if pid in ranks - state.told]
        state, actions = _tell(state, untold, "which the job left behind")
        line = f"{len(left)} processes that ranks left behind have {by - now:.0f} s to end."
        lines = (Log(line),) if math.isinf(state.deadline) and not actions else ()
        return state._replace(deadline=tell_at), (*lines, *actions)
    # Ranks, and not what those have started that still run.
    to_tell = [pid for pid, leader in event.processes if pid == leader or leader not in ranks]
    state, actions = _tell(state, to_tell, "which the job left behind")
    return state._replace(deadline=by), actions


def _tell(state: State, pids: Sequence[int], what: str) -> Step:
    """Have processes end that have not been told to."""
    new = [pid for pid in pids if pid not in state.told]
    lines = tuple(Log(f"ending process {pid}, {what}.") for pid in new)
    actions = (*lines, SignalProcesses(new, signal.SIGTERM)) if new else ()
    return state._replace(told=state.told | frozenset(new)), actions


def _kill_left(state: State, pids: Sequence[int], now: float) -> Step:
    """Kill what is left; again in a second, should it last."""
    state = state._replace(deadline=now + _AGAIN, killed_at=min(state.killed_at, now))
    return state, (SignalProcesses(pids, signal.SIGKILL),)


def _drained(state: State) -> Step:
    """Say so if the ranks of this host have succeeded; then wait for the other hosts."""
    if not state.job.has_peers:
        result = Result(0)
        if state.failure:
            result = state.failure.result
        elif state.returncode and state.stop_signal:
            result = stopped_by(state.stop_signal)
        return enter(state, P.DONE, result=result), ()
    actions = (Tell(Succeeded()),) if state.returncode == 0 else ()
    return enter(state, P.WAITING if state.result is None else P.DONE), actions


@when(P.WAITING, on=Decided, to=(P.DONE,))
def _decided_while_waiting(state: State, event: Decided, now: float) -> Step:
    """End with the job's result."""
    return enter(state, P.DONE), ()


# Before ranks start again.


@when(P.RUNNING, P.FAILING, P.RESTARTING, on=TorchrunStarts, to=(P.CLEARING,))
def _torchrun_starts(state: State, event: TorchrunStarts, now: float) -> Step:
    """Look for what the last attempt left behind, before new ranks start."""
    by = now + state.job.failure_grace
    state = enter(state, P.CLEARING, leftovers_by=by, told=frozenset())
    state = state._replace(ranks={}, failed=(), untold=(), certain_by=math.inf)
    return state, (Look(behind=True),)


# Torchrun ends, but not what runs it.


@when(P.RUNNING, P.RESTARTING, P.CLEARING, on=TorchrunGone, to=(P.CLEARING, P.ENDING))
@when(P.FAILING, P.HOLDING, on=TorchrunGone, to=(P.ENDING,))
def _torchrun_gone(state: State, event: TorchrunGone, now: float) -> Step:
    """End what it left behind: the program that runs it waits for the end of all output."""
    by = now + state.job.failure_grace
    if event.returncode == 0:
        return enter(state, P.CLEARING, leftovers_by=by, ranks={}), (Look(behind=True),)
    # Ranks that still run have lost a torchrun that was killed: how they end is not the cause.
    closing_at, error = min(state.closing_at, now), event.error or state.torchrun_error
    state = state._replace(torchrun_error=error)
    state = enter(state, P.ENDING, by, leftovers_by=by, closing=Why.ERROR, closing_at=closing_at)
    state, actions = tell_certain(state, now, everything=True)
    if event.says_why and state.result is None:
        actions += (Tell(_failure(state, TorchrunEnded(event.returncode, (), event.error), now)),)
    return state, (*actions, Look(behind=True))


@when(P.ENDING, on=TorchrunGone)
def _gone_while_ending(state: State, event: TorchrunGone, now: float) -> Step:
    """End what it left behind: the program that runs it waits for the end of all output."""
    return state, (Look(behind=True),)


@when(P.ENDING, on=Remaining)
def _end_left(state: State, event: Remaining, now: float) -> Step:
    """End what is left with SIGTERM; once its time is over it is killed."""
    return _tell(state, [pid for pid, _ in event.processes], "which the job left behind")


@when(P.CLEARING, on=Remaining, to=(P.RUNNING,))
def _clear(state: State, event: Remaining, now: float) -> Step:
    """End what is left with SIGTERM, and with SIGKILL when its time is over; then go on."""
    left = [pid for pid, _ in event.processes]
    by = state.leftovers_by
    if not left or now >= state.killed_at + MARGIN:
        state = enter(state, P.RUNNING, leftovers_by=math.inf, killed_at=math.inf)
        return state._replace(closing=None, closing_at=math.inf), (Answer(),)
    if now >= by:
        return _kill_left(state, left, now)
    state, actions = _tell(state, left, "which the last attempt left behind")
    return state._replace(deadline=by), actions


# Killing all of the job.


@when(P.KILLING, on=Remaining)
def _kill(state: State, event: Remaining, now: float) -> Step:
    """Kill all that is left; look again in a second."""
    left = [pid for pid, _ in event.processes]
    state = state._replace(deadline=now + _AGAIN, leftovers_by=now + _AGAIN)
    line = f"killing {len(left)} processes of the job with SIGKILL."
    lines = () if state.told else (Log(line),)
    state = state._replace(told=frozenset(left))
    return state, (*lines, SignalProcesses(left, signal.SIGKILL))


@when(P.KILLING, on=TorchrunAsks)
def _asks_while_killing(state: State, event: TorchrunAsks, now: float) -> Step:
    """Let torchrun go on: it is being killed, too."""
    return state, (Answer(),)


@when(P.KILLING, on=TorchrunStarts)
def _starts_while_killing(state: State, event: TorchrunStarts, now: float) -> Step:
    """Let torchrun wait: it is being killed, too."""
    return state, ()
