"""Rules for ranks that fail, and for a torchrun that ends ranks or starts them again."""

from __future__ import annotations

import math
import signal

from launcher.events import Decided, Log, Tell, Time
from launcher.result.causes import SECONDARY_PATIENCE, Cause, Result
from launcher.result.failure_text import headline, of_ranks, of_torchrun
from launcher.run.events import (
    Look,
    RankEnded,
    RankFailed,
    SignalProcesses,
    SignalTorchrun,
    TorchrunAsks,
    Why,
)
from launcher.run.state import (
    MARGIN,
    TO_BE_CERTAIN,
    Actions,
    P,
    State,
    Step,
    end_ranks,
    enter,
    kill_torchrun,
    tell_certain,
    to_pass_on,
    when,
)
from launcher.run.stopping import stop


@when(P.RUNNING, on=RankFailed, to=(P.FAILING,))
@when(P.FAILING, on=RankFailed, to=(P.RUNNING, P.ENDING, P.STOPPING))
@when(P.HOLDING, on=RankFailed, to=(P.ENDING,))
def _rank_failed(state: State, event: RankFailed, now: float) -> Step:
    """Note the failure, or take it back if the rank ends with 0; tell the other hosts in 2.5 s.

    They are told as soon as the exit code is certain: a sys.excepthook may choose another one.
    """
    return _note(state, event.pid, now)


@when(P.ENDING, on=RankFailed)
def _rank_failed_while_ending(state: State, event: RankFailed, now: float) -> Step:
    """Note it for the text: a rank that fails while torchrun ends it is not the cause."""
    return _note(state, event.pid, now)


@when(P.RESTARTING, P.CLEARING, on=RankFailed)
def _rank_failed_while_restarting(state: State, event: RankFailed, now: float) -> Step:
    """Nothing: torchrun ends the ranks, so that is not a cause."""
    return state, ()


def _note(state: State, pid: int, now: float) -> Step:
    rank = state.ranks[pid]
    result = state.result
    if result and rank.exit_code == 0 and state.phase is P.FAILING:
        # torchrun sees no failure, so that the ranks have not got SIGTERM yet.
        state = _withdraw(state, rank.pid)
        return (state, ()) if state.failed else _stop_or_end(state, result, now)
    if result or state.closing is Why.ERROR or rank.failure is None:
        return state, ()
    if rank.exit_code == 0:
        state = _withdraw(state, rank.pid)
        if state.late_stop and state.phase is P.RUNNING:
            return stop(state, state.late_stop, now)
        return _unless_held(state, now)
    if rank.restart < rank.max_restarts:
        return _restarts(state, pid, now)
    if state.phase is P.RUNNING:
        by = now + state.job.failure_grace  # how long the rank itself may take to end
        state = enter(state, P.FAILING, by, leftovers_by=by)
    if rank.pid not in state.failed:
        state = state._replace(failed=(*state.failed, rank.pid))
    if rank.pid not in state.untold and state.phase is not P.ENDING:
        by = min(state.certain_by, now + TO_BE_CERTAIN)
        state = state._replace(untold=(*state.untold, rank.pid), certain_by=by)
    state, actions = tell_certain(state, now)
    state, more = _unless_held(state, now)
    return state, actions + more


def _withdraw(state: State, pid: int) -> State:
    """A rank raised, but its own hook ended it with 0: it has not failed."""
    state = state._replace(
        failed=tuple(one for one in state.failed if one != pid),
        untold=tuple(one for one in state.untold if one != pid),
    )
    if not state.untold:
        state = state._replace(certain_by=math.inf)
    if state.phase is P.FAILING and not state.failed:
        state = enter(state, P.RUNNING, leftovers_by=math.inf)
    return state


def _restarts(state: State, pid: int, now: float) -> Step:
    rank = state.ranks[pid]
    if rank.exit_code is None or rank.failure is None:
        return state, ()
    host = state.job.current_host
    failure = of_ranks([rank.failure], host, now - state.started, Cause.RESTARTED)
    return state, (Log(f"{headline(rank.failure, host)}; torchrun restarts it."), Tell(failure))


def _wants_better_cause(state: State) -> bool:
    failures = [state.ranks[pid].failure for pid in state.failed]
    only_secondary = all(failure and failure.is_secondary for failure in failures)
    others = [rank for rank in state.alive if rank.pid not in state.failed]
    return bool(failures) and only_secondary and bool(others)


def _unless_held(state: State, now: float) -> Step:
    """Let a torchrun that is held end the ranks as soon as there is nothing to wait for."""
    if state.phase is not P.HOLDING or _wants_better_cause(state):
        return state, ()
    return end_ranks(state, Why.FAILURE, now)


@when(P.HOLDING, on=RankEnded, to=(P.ENDING,))
def _rank_ended_while_holding(state: State, event: RankEnded, now: float) -> Step:
    """Let torchrun end the ranks if no other rank is left that could name a better cause."""
    return _unless_held(state, now)


@when(P.FAILING, on=RankEnded)
def _rank_ended(state: State, event: RankEnded, now: float) -> Step:
    """Give torchrun its time to see that the rank that failed first has ended."""
    if state.failed[:1] != (event.pid,):
        return state, ()
    by = now + state.job.failure_grace
    return state._replace(leftovers_by=by, deadline=max(by, now + MARGIN)), ()


@when(P.FAILING, on=Time, to=(P.KILLING,))
def _failed_rank_hangs(state: State, event: Time, now: float) -> Step:
    """Kill the rank that failed first; if it has ended, kill torchrun or the whole job."""
    first = state.ranks[state.failed[0]]
    if first.runs:
        seconds = f"{state.job.failure_grace:g}"
        line = (
            f"rank {first.rank} has failed but still runs {seconds} s later: "
            "killing it with SIGKILL (--launcher-failure-grace sets its time to end)."
        )
        state = state._replace(deadline=now + state.job.failure_grace + MARGIN)
        return state, (Log(line), SignalProcesses((first.pid,), signal.SIGKILL))
    return _give_up(state, now)


@when(P.ENDING, P.STOPPING, on=Time, to=(P.KILLING,))
def _time_is_up(state: State, event: Time, now: float) -> Step:
    """Kill torchrun if no rank runs, or if it has not asked to end them; else the whole job."""
    return _give_up(state, now)


def _give_up(state: State, now: float) -> Step:
    if not state.alive:
        return kill_torchrun(state, now)
    if state.closing is None and math.isinf(state.killed_at):
        line = (
            "torchrun has not started to end the ranks: "
            "killing it with SIGKILL and ending the ranks directly."
        )
        state = state._replace(deadline=now + MARGIN, killed_at=now)
        return state, (Log(line), SignalTorchrun(signal.SIGKILL))
    line = "ranks still run at the end of their grace."
    return enter(state, P.KILLING, told=frozenset()), (Log(line), Look())


# Torchrun asks.


@when(P.RUNNING, on=TorchrunAsks, to=(P.ENDING, P.RESTARTING))
@when(P.FAILING, on=TorchrunAsks, to=(P.HOLDING, P.ENDING, P.RESTARTING))
@when(P.HOLDING, P.ENDING, P.RESTARTING, P.CLEARING, on=TorchrunAsks, to=(P.ENDING, P.RESTARTING))
def _torchrun_asks(state: State, event: TorchrunAsks, now: float) -> Step:
    """Let torchrun end the ranks, but first wait 3 s if only secondary failures are known.

    A rank that cleans up before it reports its error would otherwise be killed without a word,
    because another rank saw the broken connection first.
    """
    if event.why is Why.RESTART and state.result and state.phase is P.FAILING:
        # Another host's torchrun restarts its ranks, but the job ends.
        state, actions = end_ranks(state, Why.STOP, now)
        return state, (*actions, SignalTorchrun(signal.SIGTERM))
    may_hold = state.phase is P.FAILING and event.why is Why.FAILURE and not state.result
    if may_hold and _wants_better_cause(state):
        return enter(state, P.HOLDING, now + SECONDARY_PATIENCE), ()
    state, actions = end_ranks(state, event.why, now, event.error)
    if event.why is Why.ERROR and not state.result:
        job, seconds = state.job, now - state.started
        failure = of_torchrun(1, event.error, job.hosts, job.current_host, job.endpoint, seconds)
        actions += (Tell(failure),)
    return state, actions


@when(P.HOLDING, on=Time, to=(P.ENDING,))
def _no_better_cause(state: State, event: Time, now: float) -> Step:
    """Let torchrun end the ranks: no better cause has come."""
    return end_ranks(state, Why.FAILURE, now)


# What the other hosts decided.


@when(P.RUNNING, P.RESTARTING, P.CLEARING, on=Decided, to=(P.ENDING, P.STOPPING))
def _decided(state: State, event: Decided, now: float) -> Step:
    """Stop or end the ranks: the job was stopped, or failed elsewhere."""
    return _stop_or_end(state, event.result, now, store_is_lost=event.store_is_lost)


def _stop_or_end(state: State, result: Result, now: float, *, store_is_lost: bool = False) -> Step:
    if result.stop_signal:
        return stop(state, result.stop_signal, now)
    if result.exit_code == 0:
        return state, ()
    grace = state.job.failure_grace
    # torchrun does not react to SIGTERM while it waits for a store that is gone, or in its exit
    # barrier. DRAINING ends the ranks then.
    cannot_react = not state.alive or store_is_lost
    line = f"ending the ranks of {state.job.current_host}: {result.text.partition(chr(10))[0]}"
    number = signal.SIGKILL if cannot_react else signal.SIGTERM
    state = enter(state, P.ENDING, now + to_pass_on(grace), leftovers_by=now + grace)
    state = state._replace(closing=None, killed_at=math.inf)
    return state, (Log(line), SignalTorchrun(number))


@when(P.HOLDING, on=Decided, to=(P.ENDING, P.STOPPING))
@when(P.FAILING, P.ENDING, on=Decided, to=(P.STOPPING,))
def _decided_while_failing(state: State, event: Decided, now: float) -> Step:
    """Go on ending the ranks; if a stop elsewhere came first, stop them."""
    actions: Actions = ()
    if state.phase is P.HOLDING:
        state, actions = end_ranks(state, Why.FAILURE, now)
    if event.result.stop_signal:
        state, more = stop(state, event.result.stop_signal, now)
        actions += more
    return state, actions
