"""What becomes of this host's torchrun and ranks: an event and the time in, actions out.

    state, actions = step(state, event, now)

torchrun starts ranks; it ends none, and restarts none. Its agent (agent.py) asks before it starts
them, and before it would end them it waits until they have ended. They end here, in the phase
Ending, for whatever reason.
Times are on the clock time.monotonic(), waits in seconds. Pure.
"""

from __future__ import annotations

import math
import signal
from typing import Any

from launcher.peers.events import AllKnow
from launcher.peers.messages import (
    AtRendezvous,
    End,
    Failed,
    Job,
    NoRanksAnywhere,
    NoRanksHere,
    Restart,
    Start,
    Stop,
    Succeeded,
)
from launcher.result.causes import Result, stopped
from launcher.run import ranks
from launcher.run.ending import (
    advance,
    ended_while_ending,
    failed_before,
    gpus_said,
    instead,
    ranks_signalled,
    remaining,
)
from launcher.run.events import (
    Actions,
    Answer,
    CannotStart,
    ChildEnded,
    CloseRequested,
    FindLeftovers,
    GpusChecked,
    LauncherFailed,
    LeftoversFound,
    OrphanEnded,
    PlacesReported,
    RankRuns,
    RanksStarted,
    ReachedRendezvous,
    Signal,
    Signalled,
    StartRequested,
    StartTorchrun,
    Tell,
    TorchrunEnded,
    TorchrunRuns,
)
from launcher.run.failing import count, fail, of_torchrun_here, stopped_by_others, tell_ends
from launcher.run.state import (
    DEPART_SECONDS,
    INTERRUPTS_TO_KILL,
    INTERRUPTS_WITHIN_SECONDS,
    PART_OF_STOP_SECONDS,
    Departing,
    Done,
    Ending,
    Failing,
    Joining,
    Restarting,
    Running,
    State,
    Step,
    Times,
    Torchrun,
    Waiting,
    Why,
)
from launcher.text.words import Log, signal_name


def begin(job: Job, runner: str, now: float) -> State:
    """Return the state at the launcher's start."""
    return State(job, Times(now), runner)


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while all ranks run."""
    phase = state.phase
    if isinstance(phase, Running):
        return min(phase.told_by, state.count_at)
    if isinstance(phase, Failing):
        return min(phase.by, state.count_at)
    if isinstance(phase, Departing):
        return phase.by
    return phase.due if isinstance(phase, Ending) else math.inf


def step(state: State, event: Any, now: float) -> Step:
    """Return the state after an event, and the actions to carry out."""
    if isinstance(event, ranks.REPORTS):
        return rank_reports(state, event, now)
    if isinstance(event, RanksStarted):
        return ranks_started(state, event, now)
    if isinstance(event, Signal):
        return signalled(state, event.number, now)
    if isinstance(event, Start):
        return started(state, event, now)
    if isinstance(event, End):
        return ended(state, event.result, now)
    if isinstance(event, Restart):
        return restarted(state, event, now)
    if isinstance(event, ReachedRendezvous):
        return state, _meeting(state, has_met=False)
    if isinstance(event, StartRequested):
        return asks_to_start(state, now)
    if isinstance(event, CloseRequested):
        return asks_to_end(state, event, now)
    if isinstance(event, TorchrunRuns):
        return torchrun_runs(state, now)
    if isinstance(event, TorchrunEnded):
        return torchrun_ended(state, event, now)
    if isinstance(event, ChildEnded):
        return child_ended(state, event, now)
    if isinstance(event, Signalled):
        return ranks_signalled(state, event)
    if isinstance(event, LeftoversFound):
        return remaining(state, event, now)
    if isinstance(event, GpusChecked):
        return gpus_said(state, event, now)
    if isinstance(event, OrphanEnded):
        return state, (FindLeftovers(),) if isinstance(state.phase, Ending) else ()
    if isinstance(event, NoRanksAnywhere):
        known = event.attempt == state.attempt
        return _go_on(state._replace(no_ranks_left=state.no_ranks_left or known), now)
    if isinstance(event, PlacesReported):
        return state._replace(ranks=ranks.placed(state.ranks, event.places)), ()
    if isinstance(event, CannotStart):
        return cannot_start(state, event, now)
    if isinstance(event, LauncherFailed):
        return launcher_failed(state, event, now)
    if isinstance(event, AllKnow):
        return all_know(state)
    return time_is_up(state, now)


# What the coordinator says.


def started(state: State, event: Start, now: float) -> Step:
    """Start torchrun for an attempt."""
    if not isinstance(state.phase, (Joining, Restarting)):
        return state, ()  # a stop came first
    times = state.times
    times = times._replace(started=min(times.started, now), attempt=now, closes=math.inf)
    state = state._replace(
        phase=Running(),
        attempt=event.attempt,
        times=times,
        ranks={},
        torchrun=Torchrun(),
        no_ranks_left=False,
    )
    return state, (StartTorchrun(event.attempt),)


def ended(state: State, result: Result, now: float) -> Step:
    """End the ranks: the job was stopped, has failed, or has succeeded."""
    phase = state.phase
    if state.result is not None:
        return state, ()
    state = state._replace(result=result)
    if isinstance(phase, Joining):
        return state._replace(phase=Departing(now + DEPART_SECONDS)), ()
    if isinstance(phase, (Restarting, Waiting)):
        return state._replace(phase=Done()), (Tell(NoRanksHere(state.attempt)),)
    if isinstance(phase, (Departing, Done)):
        return state, ()
    if result.stop_signal:
        return _stop(state, result.stop_signal, now)
    if result.exit_code == 0:
        by = now + state.job.failure_grace
        ending = phase if isinstance(phase, Ending) else Ending(Why.SUCCESS, now, by)
        return advance(state, ending._replace(decided_at=now), now)
    if isinstance(phase, Ending):
        if phase.why in (Why.SUCCESS, Why.RESTART):
            return advance(state, instead(phase, Why.FAILURE, now, state.job.failure_grace), now)
        return state, ()
    state, actions = _end(state, Why.FAILURE, now)
    if state.alive:
        cause = result.text.partition("\n")[0]
        actions = (Log(f"ending the ranks of {state.job.current_host}: {cause}"), *actions)
    return state, actions


def restarted(state: State, event: Restart, now: float) -> Step:
    """End the ranks, for all hosts to start them again."""
    phase, line = state.phase, Log(event.why)
    if event.attempt != state.attempt:
        return state, ()
    if isinstance(phase, Running) and phase.told_to_end:
        state, actions = fail(state, stopped_by_others(state, phase, now), now)
    elif isinstance(phase, (Running, Failing, Waiting)):
        state, actions = _end(state, Why.RESTART, now)
    elif isinstance(phase, Ending) and phase.why in (Why.SUCCESS, Why.FAILURE):
        phase = instead(phase, Why.RESTART, now, state.job.failure_grace)
        state, actions = advance(state, phase, now)
    else:
        return state, ()  # a stop has come, which the coordinator is about to hear of
    return state, (line, *actions)


def all_know(state: State) -> Step:
    """End, if nothing was started here: no other host has to be told any more."""
    return (_leave(state), ()) if isinstance(state.phase, Departing) else (state, ())


def _leave(state: State) -> State:
    own = state.failure.result if state.failure else None
    return state._replace(phase=Done(), result=state.result or own)


# Before torchrun runs, and signals.


def cannot_start(state: State, event: CannotStart, now: float) -> Step:
    """Tell the other hosts why this one cannot start torchrun."""
    if isinstance(state.phase, Done):
        return state, ()  # a stop came first
    state = state._replace(phase=Departing(now + DEPART_SECONDS), failure=event.failure)
    return state, (Tell(Failed(state.attempt, event.failure)),)


def launcher_failed(state: State, event: LauncherFailed, now: float) -> Step:
    """Tell the other hosts; a stop, and what is known of the end before, counts more."""
    phase = state.phase
    if isinstance(phase, Joining):
        return cannot_start(state, CannotStart(event.failure), now)
    if state.result or isinstance(phase, (Departing, Done)):
        return state, ()
    success = isinstance(phase, Ending) and phase.why is Why.SUCCESS
    if success or isinstance(phase, (Running, Failing)):
        return fail(state, event.failure, now)
    return state, (Tell(Failed(state.attempt, event.failure)),)


def signalled(state: State, number: int, now: float) -> Step:
    """Stop all hosts: each rank gets the signal once, and has its grace to save."""
    if number == signal.SIGINT:
        recent = [at for at in state.interrupts if now - at < INTERRUPTS_WITHIN_SECONDS]
        state = state._replace(interrupts=(*recent, now))
        if len(state.interrupts) >= INTERRUPTS_TO_KILL:
            return _interrupted(state, now)
    phase, name = state.phase, signal_name(number)
    why = phase.why if isinstance(phase, Ending) else None
    tell: Actions = () if state.result else (Tell(Stop(number)),)
    barrier = why is Why.SUCCESS and state.others_are_unheard  # which may last for minutes
    if barrier or (tell and (isinstance(phase, Running) or why is Why.RESTART)):
        state, actions = _stop(state, number, now)
        return state, (*tell, *actions)
    if tell and isinstance(phase, (Joining, Departing, Restarting)):
        return state, tell
    if why is Why.STOP:
        line = f"{name} again: the ranks are already stopping and keep their time to save."
        return state, (Log(line),)
    if tell and (isinstance(phase, Waiting) or why is Why.SUCCESS):
        line = f"{name} while the other hosts go on: stopping them."
        return state, (Log(line), *tell) if state.job.members else tell
    # After a failure a stop counts if ranks are to be restarted.
    return state, (Log(f"{name}: the job is already ending."), *tell)


def _interrupted(state: State, now: float) -> Step:
    """Kill all that runs, at once; the other hosts cannot be waited for."""
    if isinstance(state.phase, (Running, Failing, Ending)):
        line = Log("SIGINT for the third time within 2 s: killing the job at once.")
        phase = state.phase if isinstance(state.phase, Ending) else Ending(Why.STOP, now, now)
        state, actions = advance(state, phase._replace(why=Why.INTERRUPT, by=now), now)
        return state, (line, *actions)
    line = Log("SIGINT for the third time within 2 s: ending at once.")
    return _leave(state._replace(result=state.result or stopped(signal.SIGINT))), (line,)


def _stop(state: State, number: int, now: float) -> Step:
    """Pass a stop on to the ranks; those that were told to end already keep the later deadline."""
    grace, host, phase = state.job.grace, state.job.current_host, state.phase
    before: Actions = ()
    if isinstance(phase, Ending):
        if phase.why in (Why.STOP, Why.INTERRUPT):
            return state, ()
        phase = instead(phase, Why.STOP, now, grace)._replace(number=number)
    else:
        phase = Ending(Why.STOP, now, now + grace, number)
        before = failed_before(state, state.ranks.values(), number)
    line = f"{signal_name(number)}: stopping; the ranks of {host} have {grace:g} s to save."
    state, actions = advance(_closing(state, now), phase, now)
    return state, (Log(line), *before, *actions)


# Torchrun.


def torchrun_runs(state: State, now: float) -> Step:
    """Note that torchrun runs; a program that runs it may do so again after a success."""
    torchrun, phase = state.torchrun, state.phase
    if torchrun.has_ended:
        torchrun = Torchrun(child_has_ended=torchrun.child_has_ended)
        if isinstance(phase, Ending) and phase.why is Why.SUCCESS:
            state = state._replace(phase=Running(), ranks={})
    return _go_on(state._replace(torchrun=torchrun._replace(runs=True)), now)


def asks_to_start(state: State, now: float) -> Step:
    """Let torchrun start the ranks, unless they are to end: then it is killed."""
    if isinstance(state.phase, Running):
        torchrun = state.torchrun
        torchrun = torchrun._replace(leave=torchrun.leave + 1, has_started_ranks=False)
        met = _meeting(state, has_met=True)
        return state._replace(torchrun=torchrun, ranks={}), (*met, Answer())
    return _go_on(state, now)


def _meeting(state: State, *, has_met: bool) -> Actions:
    """Return what the coordinator is told of a restart, which it bounds; torchrun has the first."""
    again = state.attempt > 1 and isinstance(state.phase, Running) and state.job.members
    return (Tell(AtRendezvous(state.attempt, has_met)),) if again else ()


def ranks_started(state: State, event: RanksStarted, now: float) -> Step:
    """Note the ranks; what they have reported before is kept."""
    known = {pid: ranks.Rank(pid, rank, local) for pid, rank, local in event.ranks}
    torchrun = state.torchrun._replace(has_started_ranks=True, keeps_store=event.keeps_store)
    state = state._replace(ranks={**known, **state.ranks}, torchrun=torchrun)
    return _go_on(state, now)


def asks_to_end(state: State, event: CloseRequested, now: float) -> Step:
    """Have torchrun wait until its ranks have ended; if they were not to end, this host fails."""
    state = state._replace(torchrun=state.torchrun._replace(asks=True, tees=event.tees))
    if not isinstance(state.phase, Running) or state.has_succeeded:
        return _go_on(state, now)
    if event.error:
        return fail(state, of_torchrun_here(state, 0, event.error, now), now)
    if event.number:
        by = min(state.phase.told_by, now + PART_OF_STOP_SECONDS)  # it may have been told twice
        return state._replace(phase=Running(event.number, by)), ()
    if any(rank.failure for rank in state.ranks.values()):
        return state, ()  # which counts soon
    error = "it was about to end its ranks for a reason of its own"
    return fail(state, of_torchrun_here(state, 0, error, now), now)


def torchrun_ended(state: State, event: TorchrunEnded, now: float) -> Step:
    """Fail if torchrun ended before it was to."""
    torchrun = state.torchrun._replace(asks=False, ended_at=now)
    state, counted = count(state._replace(torchrun=torchrun), now, everything=True)
    has_failed = event.returncode != 0 or not state.has_succeeded
    if has_failed and _is_to_go_on(state):
        failure = of_torchrun_here(state, event.returncode, event.error, now, oom=event.oom)
        state, actions = fail(state, failure, now)
    else:
        state, actions = _go_on(state, now)
    return state, counted + actions


def child_ended(state: State, event: ChildEnded, now: float) -> Step:
    """Go on if that was torchrun; a program that runs it may fail by itself."""
    state = state._replace(torchrun=state.torchrun._replace(child_has_ended=True))
    code = event.returncode
    if not state.runner or not _is_to_go_on(state):
        return _look_again(state, now)
    if code == 0 and state.torchrun.has_ended and state.has_succeeded:
        state, actions = _look_again(state, now)
        return state, (Tell(Succeeded(state.attempt)), *actions)
    error = "" if code else "it did not run torchrun to its end"
    return fail(state, of_torchrun_here(state, code, error, now, state.runner, event.oom), now)


def _is_to_go_on(state: State) -> bool:
    """Tell whether torchrun, or what runs it, fails this host by ending in any way but well."""
    phase = state.phase
    if not isinstance(phase, Ending):
        return isinstance(phase, Running)
    return state.result is None and phase.why is Why.SUCCESS


def _look_again(state: State, now: float) -> Step:
    """Look what is left, now that torchrun is gone."""
    if not isinstance(state.phase, Ending):
        return state, ()
    state, actions = advance(state, state.phase._replace(left=None), now)
    return state, (*actions, FindLeftovers())


# Ranks.


def rank_reports(state: State, event: ranks.Report, now: float) -> Step:
    """Note what is known of a rank; its failure may count, or its success complete this host's."""
    if isinstance(event, RankRuns) and math.isinf(state.times.trains):
        state = state._replace(times=state.times._replace(trains=now))
    before = state.ranks.get(event.pid)
    was_known = before is not None and before.exit_code is not None
    state = state._replace(ranks=ranks.updated(state.ranks, event, now - state.times.attempt))
    rank = state.ranks.get(event.pid)
    actions: Actions = ()
    if isinstance(state.phase, Ending) and rank and rank.exit_code is not None and not was_known:
        actions = ended_while_ending(state, state.phase, rank)
    elif rank and rank.exit_code == 0 and not was_known:
        actions = tell_ends(state, now, only_first=isinstance(state.phase, Running))
    state, counted = count(state, now)
    actions += counted
    state, more = _go_on(state, now)
    return state, actions + more


# Ending.


def time_is_up(state: State, now: float) -> Step:
    """Do what is due."""
    phase = state.phase
    if isinstance(phase, Departing) and now >= phase.by:
        return _leave(state), ()
    if isinstance(phase, Running) and now >= phase.told_by:
        return fail(state, stopped_by_others(state, phase, now), now)
    if isinstance(phase, Failing) and now >= phase.by:
        return _end(state, Why.FAILURE, now)
    state, actions = count(state, now)
    state, more = _go_on(state, now)
    return state, actions + more


def _end(state: State, why: Why, now: float) -> Step:
    state = state if why is Why.SUCCESS else _closing(state, now)
    return advance(state, Ending(why, now, now + state.job.failure_grace), now)


def _closing(state: State, now: float) -> State:
    times = state.times
    times = times._replace(closes=min(times.closes, now))
    return state._replace(times=times, count_at=math.inf)


def _go_on(state: State, now: float) -> Step:
    """Go on with what has begun: an end, or the success of this host."""
    if isinstance(state.phase, Ending):
        return advance(state, state.phase, now)
    if isinstance(state.phase, Running) and state.has_succeeded:
        state, actions = _end(state, Why.SUCCESS, now)
        if not state.runner:
            actions = (*tell_ends(state, now), Tell(Succeeded(state.attempt)), *actions)
        return state, actions
    return state, ()
