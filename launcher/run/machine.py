"""What becomes of this host's torchrun and ranks: an event and the time in, actions out. Pure.

    state, actions = step(state, event, now)

*A phase* is how far this host's share of the job is, and says what an event means. What is known in
it alone is in its value. EVENTS has the function that takes an event; it branches on the phase.
rows.py has all changes of phase, and every step of a test is checked against it.

*Who owns ranks.* torchrun starts them, with permission; it ends none, and restarts none. They are
the launcher's children, and each waits for go before its script runs: once they are to end, none
that comes is let go. torchrun's agent (agent.py) requests the start, and requests the close before
it would end them: it gets its reply when no rank runs. All of them end here, in the phase Ending,
for whatever reason (ending.py).

*Who decides.* The coordinator, on how the job ends and on restarts. This host reports what happens
and does what is commanded; by itself it acts on a stop, sends its other ranks SIGTERM once one has
failed for its own reason (failing.py), and acts where no command comes in time.

*What bounds each wait.* Joining: the coordinator, by the start timeout. Departing: 3 s. Running
lasts as long as the job; what a rank raised counts 2.5 s later, a foreign signal to torchrun after
1 s. Failing: the patience with the cause, and 5 s. Ending: each of its parts says by itself.
Restarting and Waiting: the coordinator, whose loss is an End.

*What holds always.*
- The result is set once. Where a stop and a failure are known, the coordinator has chosen.
- In Restarting, Waiting and Done nothing of the job runs here, but for what has survived SIGKILL
  for 5 s, which was reported; or else an attempt would begin beside the one before.
- An attempt begins when all hosts have cleared the one before, so events of its processes are of
  this one. Commands name theirs.
- Each process gets the signal that ends it once; only a longer grace is given after that.
- All actions of a step are carried out before the next event is taken in (supervisor.py).

Times are on the clock time.monotonic(), waits in seconds.
"""

from __future__ import annotations

import math
import signal
from typing import Any, Callable

from launcher.job.job import Job
from launcher.peers.events import AllKnow
from launcher.peers.messages import (
    AtRendezvous,
    End,
    Failed,
    NoRanksAnywhere,
    NoRanksHere,
    Restart,
    Start,
    Stop,
    Succeeded,
)
from launcher.result.causes import stopped
from launcher.run import ranks
from launcher.run.ending import (
    advance,
    begun,
    deadline,
    ended_while_ending,
    failed_before,
    gpus_checked,
    instead,
    leftovers_found,
    ranks_signalled,
)
from launcher.run.events import (
    Actions,
    CannotStart,
    ChildEnded,
    CloseRequested,
    FindLeftovers,
    GpusChecked,
    LauncherFailed,
    LeftoversFound,
    OrphanEnded,
    PlacesReported,
    RankEnded,
    RankExits,
    RankNotStarted,
    RankRuns,
    ReachedRendezvous,
    Reply,
    ReplyToRank,
    Report,
    ScriptEnded,
    Signal,
    Signalled,
    StartRequested,
    StartTorchrun,
    ThreadRaised,
    Time,
    TorchrunEnded,
    TorchrunRuns,
)
from launcher.run.failing import count, fail, of_foreign_signal, of_torchrun_here, report_ends
from launcher.run.state import (
    DEPART_SECONDS,
    EXIT_BARRIER_SECONDS,
    INTERRUPTS_TO_KILL,
    INTERRUPTS_WITHIN_SECONDS,
    LAST_INTERRUPT,
    PART_OF_STOP_SECONDS,
    Departing,
    Done,
    Ending,
    Failing,
    Joining,
    Program,
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


def begin(job: Job, now: float) -> State:
    """Return the state at the launcher's start."""
    return State(job, Times(now), Program(job.runner))


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while all ranks run."""
    phase = state.phase
    if isinstance(phase, Ending):
        return deadline(state, phase)
    if isinstance(phase, (Running, Failing)):
        return min(phase.deadline, state.count_at)
    return phase.deadline if isinstance(phase, Departing) else math.inf


def step(state: State, event: Any, now: float) -> Step:
    """Return the state after an event, and the actions to carry out."""
    take = EVENTS.get(type(event))
    if take is None:
        return state, (Log(f"the run's state machine does not know {type(event).__name__}."),)
    return take(state, event, now)


# Commands of the coordinator.


def started(state: State, event: Start, now: float) -> Step:
    """Start torchrun for an attempt."""
    if not isinstance(state.phase, (Joining, Restarting)):
        return state, ()  # a stop came first
    times = state.times
    times = Times(times.began, started=min(times.started, now), attempt=now)
    state = state._replace(
        phase=Running(),
        attempt=event.attempt,
        times=times,
        ranks={},
        torchrun=Torchrun(),
        program=Program(state.program.name),
        no_ranks_anywhere=False,
    )
    return state, (StartTorchrun(event.attempt),)


def ended(state: State, event: End, now: float) -> Step:
    """End the ranks: the job was stopped, has failed, or has succeeded."""
    phase, result = state.phase, event.result
    if state.result is not None:
        return state, ()
    state = state._replace(result=result)
    if isinstance(phase, Joining):
        return state._replace(phase=Departing(now + DEPART_SECONDS)), ()
    if isinstance(phase, (Restarting, Waiting)):
        return state._replace(phase=Done()), (Report(NoRanksHere(state.attempt)),)
    if isinstance(phase, (Departing, Done)):
        return state, ()
    if result.stop_signal:
        return _stop(state, result.stop_signal, now)
    if result.exit_code == 0:
        torchrun = state.torchrun._replace(barrier_deadline=now + EXIT_BARRIER_SECONDS)
        state = state._replace(torchrun=torchrun)
        if isinstance(phase, Ending):
            return advance(state, phase, now)
        return _end(state, Why.SUCCESS, now)
    if isinstance(phase, Ending):
        if phase.why in (Why.SUCCESS, Why.RESTART):
            return advance(state, instead(state, phase, Why.FAILURE, now), now)
        return state, ()
    state, actions = _end(state, Why.FAILURE, now)
    if state.alive:
        cause = result.text.partition("\n")[0].removeprefix("launcher: ")
        actions = (Log(f"stopping local ranks because {cause}"), *actions)
    return state, actions


def restarted(state: State, event: Restart, now: float) -> Step:
    """End the ranks, for all hosts to start them again."""
    phase, line = state.phase, Log(event.why)
    if event.attempt != state.attempt:
        return state, ()
    if isinstance(phase, Running) and phase.foreign_signal:
        state, actions = fail(state, of_foreign_signal(state, phase, now), now)
    elif isinstance(phase, (Running, Failing, Waiting)):
        state, actions = _end(state, Why.RESTART, now)
    elif isinstance(phase, Ending) and phase.why in (Why.SUCCESS, Why.FAILURE):
        phase = instead(state, phase, Why.RESTART, now)
        state, actions = advance(state, phase, now)
    else:
        return state, ()  # a stop has come, which the coordinator is about to receive
    return state, (line, *actions)


def no_ranks_anywhere(state: State, event: NoRanksAnywhere, now: float) -> Step:
    """Note that no rank of this attempt runs on any host: nobody needs its store any more."""
    if event.attempt == state.attempt:
        state = state._replace(no_ranks_anywhere=True)
    return _go_on(state, now)


def all_know(state: State, event: AllKnow, now: float) -> Step:
    """End, if nothing was started here: no other host waits to know why any more."""
    return (_depart(state), ()) if isinstance(state.phase, Departing) else (state, ())


def _depart(state: State) -> State:
    own = state.failure.result if state.failure else None
    return state._replace(phase=Done(), result=state.result or own)


# Before torchrun runs, and signals.


def cannot_start(state: State, event: CannotStart, now: float) -> Step:
    """Report why this host cannot start torchrun."""
    if isinstance(state.phase, Done):
        return state, ()  # a stop came first
    state = state._replace(phase=Departing(now + DEPART_SECONDS), failure=event.failure)
    return state, (Report(Failed(state.attempt, event.failure)),)


def launcher_failed(state: State, event: LauncherFailed, now: float) -> Step:
    """Report it; a stop, and what is known of the end before, counts more."""
    phase = state.phase
    if isinstance(phase, Joining):
        return cannot_start(state, CannotStart(event.failure), now)
    if state.result or isinstance(phase, (Departing, Done)):
        return state, ()
    success = isinstance(phase, Ending) and phase.why is Why.SUCCESS
    if success or isinstance(phase, (Running, Failing)):
        return fail(state, event.failure, now)
    return state, (Report(Failed(state.attempt, event.failure)),)


def signalled(state: State, event: Signal, now: float) -> Step:
    """Report a stop; begin it where ranks run: each gets the signal once, and its grace to save.

    After a failure the coordinator decides which of the two counts.
    """
    number = event.number
    if number == signal.SIGINT:
        recent = [at for at in state.interrupts if now - at < INTERRUPTS_WITHIN_SECONDS]
        state = state._replace(interrupts=(*recent, now))
        if len(state.interrupts) >= INTERRUPTS_TO_KILL:
            return _interrupted(state, now)
    is_first, state = not state.was_signalled, state._replace(was_signalled=True)
    phase, name = state.phase, signal_name(number)
    why = phase.why if isinstance(phase, Ending) else None
    report: Actions = () if state.result else (Report(Stop(number)),)
    barrier = why is Why.SUCCESS and state.others_are_unheard  # which may last for minutes
    if barrier or (report and (isinstance(phase, Running) or why is Why.RESTART)):
        state, actions = _stop(state, number, now)
        return state, (*report, *actions)
    if report and isinstance(phase, (Joining, Departing, Restarting)):
        return state, report
    if why is Why.STOP:
        line = f"{name}: the ranks are already stopping; this does not give them more time."
        # SageMaker signals every host: the first signal here is the stop that another one reported.
        return state, () if is_first else (Log(line),)
    if report and (isinstance(phase, Waiting) or why is Why.SUCCESS):
        line = f"{name} while other hosts are still running: stopping them."
        return state, (Log(line), *report) if state.job.members else report
    # After a failure a stop counts if ranks are to be restarted.
    return state, (Log(f"{name}: the job is already ending."), *report)


def _interrupted(state: State, now: float) -> Step:
    """Kill all that runs, at once; the other hosts cannot be waited for."""
    if isinstance(state.phase, (Running, Failing, Ending)):
        line = Log(f"{LAST_INTERRUPT}: killing the job at once.")
        phase = state.phase if isinstance(state.phase, Ending) else Ending(Why.STOP, now, now)
        state, actions = advance(state, phase._replace(why=Why.INTERRUPT, deadline=now), now)
        return state, (line, *actions)
    line = Log(f"{LAST_INTERRUPT}: exiting at once.")
    return _depart(state._replace(result=state.result or stopped(signal.SIGINT))), (line,)


def _stop(state: State, number: int, now: float) -> Step:
    """Pass a stop on to the ranks; those that got a signal already keep the later deadline."""
    grace, host, phase = state.grace(Why.STOP), state.job.current_host, state.phase
    before: Actions = ()
    if isinstance(phase, Ending):
        if phase.why in (Why.STOP, Why.INTERRUPT):
            return state, ()
        phase = instead(state, phase, Why.STOP, now)._replace(number=number)
    else:
        phase = begun(state, Why.STOP, now, number)
        before = failed_before(state, state.ranks.values(), number)
    line = f"{signal_name(number)}: stopping; the ranks of {host} have {grace:g} s to save."
    if not state.ranks:
        line = f"{signal_name(number)}: stopping before any rank of {host} has started."
    state, actions = advance(_closing(state, now), phase, now)
    return state, (Log(line), *before, *actions)


# Torchrun.


def torchrun_runs(state: State, event: TorchrunRuns, now: float) -> Step:
    """Note that torchrun runs; a program that runs it may do so again after a success."""
    torchrun, phase = state.torchrun, state.phase
    if torchrun.has_ended:
        torchrun = Torchrun(child_has_ended=torchrun.child_has_ended)
        if isinstance(phase, Ending) and phase.why is Why.SUCCESS:
            state = state._replace(phase=Running(), ranks={})
    return _go_on(state._replace(torchrun=torchrun._replace(runs=True)), now)


def reached_rendezvous(state: State, event: ReachedRendezvous, now: float) -> Step:
    """Report it after a restart: the coordinator bounds how long torchruns wait for each other."""
    return state, _at_rendezvous(state, is_over=False)


def start_requested(state: State, event: StartRequested, now: float) -> Step:
    """Let torchrun start the ranks, unless they are to end: then it is killed."""
    if isinstance(state.phase, Running):
        torchrun = state.torchrun._replace(
            has_permission=True, nproc=len(event.ranks), keeps_store=event.keeps_store
        )
        report = _at_rendezvous(state, is_over=True)
        return state._replace(torchrun=torchrun, ranks={}), (*report, Reply())
    return _go_on(state, now)


def _at_rendezvous(state: State, *, is_over: bool) -> Actions:
    """Return a restart's report; at the first start torchrun's own time-out counts."""
    restarts = state.attempt > 1 and isinstance(state.phase, Running) and state.job.members
    return (Report(AtRendezvous(state.attempt, is_over)),) if restarts else ()


def close_requested(state: State, event: CloseRequested, now: float) -> Step:
    """Have torchrun wait until its ranks have ended; if they were not to end, this host fails."""
    torchrun = state.torchrun._replace(requests_close=True, tees=event.tees)
    state = state._replace(torchrun=torchrun)
    if not isinstance(state.phase, Running) or state.has_succeeded:
        return _go_on(state, now)
    if event.error:
        return fail(state, of_torchrun_here(state, 0, event.error, now), now)
    if event.number:
        # It may have got several.
        later = min(state.phase.deadline, now + PART_OF_STOP_SECONDS)
        return state._replace(phase=Running(event.number, later)), ()
    if any(rank.failure for rank in state.ranks.values()):
        return state, ()  # which counts soon
    error = "it was about to stop its ranks, although none had failed"
    return fail(state, of_torchrun_here(state, 0, error, now), now)


def torchrun_ended(state: State, event: TorchrunEnded, now: float) -> Step:
    """Fail if torchrun ended before it was to."""
    torchrun = state.torchrun._replace(requests_close=False, ended_at=now)
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
    if not state.program.name or not _is_to_go_on(state):
        return _find_leftovers(state, now)
    if code == 0 and state.torchrun.has_ended and state.has_succeeded:
        state, actions = _find_leftovers(state, now)
        return state, (Report(Succeeded(state.attempt)), *actions)
    error = "" if code else "it ended before torchrun had succeeded"
    return fail(
        state, of_torchrun_here(state, code, error, now, state.program.name, event.oom), now
    )


def _is_to_go_on(state: State) -> bool:
    """Tell whether torchrun, or what runs it, fails this host by ending in any way but well."""
    phase = state.phase
    if not isinstance(phase, Ending):
        return isinstance(phase, Running)
    return state.result is None and phase.why is Why.SUCCESS


def _find_leftovers(state: State, now: float) -> Step:
    """Find out what runs, now that torchrun is gone."""
    if not isinstance(state.phase, Ending):
        return state, ()
    leftovers = state.phase.leftovers._replace(pids=None)
    state, actions = advance(state, state.phase._replace(leftovers=leftovers), now)
    return state, (*actions, FindLeftovers())


def orphan_ended(state: State, event: OrphanEnded, now: float) -> Step:
    """Find out what still runs."""
    return state, (FindLeftovers(),) if isinstance(state.phase, Ending) else ()


# Ranks.


def rank_runs(state: State, event: RankRuns, now: float) -> Step:
    """Let a rank go, unless ranks are to end: then its script does not run."""
    known = ranks.updated(state.ranks, event, now - state.times.attempt)
    if not isinstance(state.phase, Running):
        refused = known[event.pid]._replace(is_refused=True)
        state = state._replace(ranks={**known, event.pid: refused})
        return state, (ReplyToRank(event.pid, lets_go=False),)
    times = state.times._replace(trains=min(state.times.trains, now))
    return state._replace(times=times, ranks=known), (ReplyToRank(event.pid, lets_go=True),)


def rank_reports(state: State, event: ranks.RankEvent, now: float) -> Step:
    """Note what is known of a rank; its failure may count, or its success complete this host's."""
    before = state.ranks.get(event.pid)
    was_known = before is not None and before.exit_code is not None
    state = state._replace(ranks=ranks.updated(state.ranks, event, now - state.times.attempt))
    rank = state.ranks.get(event.pid)
    actions: Actions = ()
    if isinstance(state.phase, Ending) and rank and rank.exit_code is not None and not was_known:
        actions = ended_while_ending(state, state.phase, rank)
        if rank.is_refused:  # it may have been found as a leftover process before it was known
            actions = (FindLeftovers(),)
    elif rank and rank.exit_code == 0 and not was_known:
        actions = report_ends(state, now, only_first=isinstance(state.phase, Running))
    state, counted = count(state, now)
    actions += counted
    state, more = _go_on(state, now)
    return state, actions + more


def places_reported(state: State, event: PlacesReported, now: float) -> Step:
    """Note where ranks are, for the log when they are killed."""
    return state._replace(ranks=ranks.placed(state.ranks, event.places)), ()


# Time, and what follows from what has happened.


def time_is_up(state: State, event: Time, now: float) -> Step:
    """Do what is due."""
    phase = state.phase
    if isinstance(phase, Departing) and now >= phase.deadline:
        return _depart(state), ()
    if isinstance(phase, Running) and now >= phase.deadline:
        return fail(state, of_foreign_signal(state, phase, now), now)
    if isinstance(phase, Failing) and now >= phase.deadline:
        return _end(state, Why.FAILURE, now)
    state, actions = count(state, now)
    state, more = _go_on(state, now)
    return state, actions + more


def _end(state: State, why: Why, now: float) -> Step:
    state = state if why is Why.SUCCESS else _closing(state, now)
    return advance(state, begun(state, why, now), now)


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
        if not state.program.name:
            actions = (*report_ends(state, now), Report(Succeeded(state.attempt)), *actions)
        return state, actions
    return state, ()


# Which function takes an event. Each branches on the phase in plain sight; rows.py has what it may
# do in which.
EVENTS: dict[type, Callable[[State, Any, float], Step]] = {
    Start: started,
    End: ended,
    Restart: restarted,
    NoRanksAnywhere: no_ranks_anywhere,
    AllKnow: all_know,
    CannotStart: cannot_start,
    LauncherFailed: launcher_failed,
    Signal: signalled,
    TorchrunRuns: torchrun_runs,
    ReachedRendezvous: reached_rendezvous,
    StartRequested: start_requested,
    CloseRequested: close_requested,
    TorchrunEnded: torchrun_ended,
    ChildEnded: child_ended,
    RankRuns: rank_runs,
    RankNotStarted: rank_reports,
    RankExits: rank_reports,
    ThreadRaised: rank_reports,
    ScriptEnded: rank_reports,
    RankEnded: rank_reports,
    PlacesReported: places_reported,
    Signalled: ranks_signalled,
    OrphanEnded: orphan_ended,
    LeftoversFound: leftovers_found,
    GpusChecked: gpus_checked,
    Time: time_is_up,
}
