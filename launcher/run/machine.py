"""Decides about this host's torchrun and ranks: an event and the time in, actions out. Pure.

    state, actions = step(state, event, now)

*Who owns ranks.* Each rank's keeper (keeper.py) starts the script, ends all of its processes, and
reports when none is left. torchrun starts a stub for each (stub.py), once; the stub outlives the
script, so torchrun sees no rank end before the job does. Every attempt begins with RunRanks.

*Who decides.* The coordinator decides how the job ends, and about restarts. This host reports
events and obeys commands; by itself it acts only on a stop, and if the coordinator is lost.

*One way to end, for every reason.* Ending: EndRanks to all keepers; when all have cleared,
`Cleared` to the coordinator. It answers with the Start of the next attempt, or with Leave. Leaving:
keepers end, and torchrun is killed; when nothing is left this host is Done. What ends because the
job ends changes nothing.

*Timeouts.* Joining: the coordinator's, or the link's. Running: none, it lasts as long as the job,
but torchrun must have started all ranks within the start timeout. Ending: the keepers' grace and
5 s; then the coordinator, whose loss acts as an End and a Leave. Leaving: a torchrun that writes
the ranks' output (--tee) has 15 s or the failure grace, if that is longer; then the failure grace
and 5 s for killed processes.

*Invariants.*
- The result of an End is preliminary, that of Leave final; a success changes only if the program
  that runs torchrun fails, or is stopped.
- Only the third Ctrl-C cuts a stop short.
- No rank runs in Joining or Done; ranks of two attempts never run at the same time.

Times are on the clock System.now(), waits in seconds.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import Any, Callable

from launcher.job.job import Job
from launcher.peers.events import Alone, Time
from launcher.peers.messages import Cleared, End, Leave, Start, Stop
from launcher.result import causes
from launcher.result.causes import SUCCESS, Cause, Failure, stopped
from launcher.run import events, ranks, summary
from launcher.run.events import Actions
from launcher.run.ranks import Rank
from launcher.run.state import Done, Ending, Joining, Leaving, Running, State, Step, Times, Why
from launcher.text.words import Log, Note, named_rank, plural, signal_name
from launcher.watch.waits import CollectStacks

# All in seconds.
WARN_SECONDS = 2.0  # from the log line about ranks that still run, and where, to their kill
COPY_SECONDS = 15.0  # at least, for torchrun to copy its ranks' last output, and to end
GONE_SECONDS = 5.0  # for killed processes to be gone
INTERRUPTS_TO_KILL, INTERRUPTS_WITHIN_SECONDS = 3, 2.0  # SIGINTs, within seconds
PLACES = CollectStacks(-1, may_signal=True)  # for the log of this host
LOCAL = -1  # number of an Ending that the coordinator has not commanded


def begin(job: Job, now: float) -> State:
    """Return the state at the launcher's start."""
    return State(job, Times(now))


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while all ranks run."""
    phase = state.phase
    if isinstance(phase, Running):
        _, wait = ranks.to_count(state.ranks, -math.inf)
        return min(phase.deadline, state.times.started + wait)
    if isinstance(phase, Ending):
        return min(phase.warn_at, phase.leave_by)
    return phase.by if isinstance(phase, Leaving) else math.inf


def step(state: State, event: Any, now: float) -> Step:
    """Return the state after an event, and the actions to carry out."""
    return EVENTS[type(event)](state, event, now)


# Commands of the coordinator.


def started(state: State, event: Start, now: float) -> Step:
    """Start torchrun; for another attempt, have keepers run the script again."""
    phase, times = state.phase, state.times
    is_first = isinstance(phase, Joining)
    if not (is_first or (isinstance(phase, Ending) and phase.why is Why.RESTART)):
        return state, ()  # a stop arrived first
    again = {one.rank: Rank(one.rank, one.local_rank) for one in state.ranks.values()}
    # The program that runs torchrun has no limit.
    is_unbounded = state.job.plan.runner or 0 < len(again) == state.nproc
    state = state._replace(
        attempt=event.attempt,
        times=Times(times.began, started=min(times.started, now), attempt_began=now),
        phase=Running(math.inf if is_unbounded else now + state.job.options.start_timeout),
        port=event.port,
        ranks=again,
    )
    begins = Note("attempt")
    if is_first:
        state = state._replace(torchrun_runs=True)
        return state, (Note("joined"), begins, events.StartTorchrun())
    return state, (begins, events.RunRanks(tuple(again)))


def ended(state: State, event: End, now: float) -> Step:
    """End the ranks: for the job's result, or for another attempt."""
    job, phase = state.job, state.phase
    if isinstance(phase, (Leaving, Done)):
        return state, ()
    # A restart decides nothing: a stop of this host may be on its way to the coordinator.
    state = state if event.restart else state._replace(decided=event.result)
    why, said = _why(event), tuple[Any, ...]()
    if why is Why.RESTART:
        said = (Log(event.restart), Note("restart", cause=event.restart))
    elif why is Why.FAILURE:
        said = (Note("ending", cause=event.result.text),)
    if isinstance(phase, Ending) and (why is not Why.STOP or phase.why is Why.STOP):
        why = phase.why if phase.why is Why.STOP else why
        return _if_clear(state, phase._replace(why=why, end_number=event.number), said, now)
    if why is Why.FAILURE and state.alive:
        state = state._replace(cause=event.result.cause)
        # The first host has logged who is absent.
        is_logged = event.result.is_hang and job.coordinates
        said += (Log(f"stopping this host's ranks: {'a hang' if is_logged else state.cause}"),)
    number = event.result.stop_signal or signal.SIGTERM
    state, actions = _end_ranks(state, why, now, number, event.number)
    return state, said + actions


def _why(event: End) -> Why:
    if event.restart:
        return Why.RESTART
    if event.result.stop_signal:
        return Why.STOP
    return Why.FAILURE if event.result.exit_code else Why.SUCCESS


def left(state: State, event: Leave, now: float) -> Step:
    """Have keepers and torchrun end: torchrun by SIGKILL, unless it still has something to do.

    It may copy ranks' last output (--tee), and a program that runs it may work on after a success,
    without a timeout. Its own end would take most of a second, and it would log much about stubs.
    """
    phase = state.phase
    if not isinstance(phase, Ending):
        return state, ()
    state, plan = state._replace(decided=event.result), state.job.plan
    by = phase.deadline + GONE_SECONDS
    if phase.open and now < by:  # the others do not wait, or are lost; but ranks here are saving
        return state._replace(phase=phase._replace(leave_by=by)), ()
    code = 0 if state.result == SUCCESS else 1
    works_on = bool(plan.runner) and not code
    if state.torchrun_runs and (works_on or plan.tees):
        by = math.inf if works_on else now + max(COPY_SECONDS, state.grace(Why.FAILURE))
        return state._replace(phase=Leaving(phase.why, by)), (events.LeaveRanks(code),)
    state, actions = _kill_torchrun(state, phase.why, now)
    return state, (*actions, events.LeaveRanks(code))


def alone(state: State, event: Alone, now: float) -> Step:
    """End without the coordinator: by the last End, for this host's own reason, or for the loss."""
    result = state.result or event.failure.result
    state, ends = ended(state, End(0, result), now)
    state, leaves = left(state, Leave(result), now)
    return state, (*ends, *leaves)


def _kill_torchrun(state: State, why: Why, now: float) -> Step:
    """Kill torchrun if it still runs; wait for what is left, perhaps of a killed keeper."""
    by = now + state.grace(Why.FAILURE) + GONE_SECONDS
    state = state._replace(phase=Leaving(why, by, is_killed=True))
    return state, (events.KillTorchrun(),) if state.torchrun_runs else ()


def nothing_left(state: State, event: events.NothingLeft, now: float) -> Step:
    """Finish: the loop looks for what is left only when this host may leave."""
    return state._replace(phase=Done()), ()


# Signals, and a host that cannot start.


def cannot_start(state: State, event: Failure, now: float) -> Step:
    """Report why this host cannot start torchrun."""
    state = state._replace(torchrun_runs=False, decided=state.decided or event.result)
    return state, (event,)


def signalled(state: State, event: Stop, now: float) -> Step:
    """Report a stop, and begin it if ranks run: each gets the signal once, and its grace to save.

    The coordinator decides whether it or a failure counts. Once ranks end for good, a stop ends
    only a runner that works on after a success.
    """
    number, phase, name = event.number, state.phase, signal_name(event.number)
    runner, is_first = state.job.plan.runner, not state.stops
    works_on = runner and state.result == SUCCESS
    state = state._replace(stops=(*state.stops, (number, now)))
    if runner:  # also for a success whose End this stop crosses
        state = state._replace(instead=state.instead or stopped(number))
    recent = [one for one, at in state.stops if now - at < INTERRUPTS_WITHIN_SECONDS]
    if number == signal.SIGINT and recent.count(number) >= INTERRUPTS_TO_KILL:
        return _interrupted(state, now)
    if isinstance(phase, Joining) or state.goes_on:
        state = state._replace(decided=stopped(number))  # if the coordinator decides nothing else
        # If there is no restart, the stop changes nothing, and the last End is the one to clear.
        end_number = phase.end_number if isinstance(phase, Ending) else LOCAL
        state, actions = _end_ranks(state, Why.STOP, now, number, end_number)
        return state, (event, *actions)
    if not works_on:
        line = f"{name}: the job is already ending; this gives ranks no more time."
        # SageMaker signals every host: another host may have reported this stop before.
        return state, () if is_first else (Log(line),)
    killed: Actions = ()  # no rank has to save anything
    if isinstance(phase, Leaving) and not phase.is_killed:
        state, killed = _kill_torchrun(state, phase.why, now)
    return state, (Log(f"{name}: killing {runner}."), *killed)


def _interrupted(state: State, now: float) -> Step:
    """Kill all processes at once, without waiting for the other hosts."""
    state, kill = _kill_torchrun(state._replace(ends=state.ends + 1), Why.STOP, now)
    said = Log(f"third SIGINT within {INTERRUPTS_WITHIN_SECONDS:g} s: killing the job at once.")
    return state, (said, events.EndRanks(state.ends, signal.SIGINT, 0.0, at_once=True), *kill)


# The end of ranks.


def _end_ranks(state: State, why: Why, now: float, signal_number: int, end_number: int) -> Step:
    """End all ranks by a signal; a keeper sends its rank only the first signal of several.

    `end_number` is that of the coordinator's End, LOCAL if it has not commanded one.
    """
    grace, phase = state.grace(why), state.phase
    deadline = now + grace
    if isinstance(phase, Ending):
        deadline = max(deadline, phase.deadline)
    ending = Ending(why, end_number, deadline, frozenset(state.ranks), signal_number)
    if state.alive and why is not Why.SUCCESS:
        # Before keepers kill the ranks: afterwards nobody knows where they were.
        ending = ending._replace(warn_at=deadline - min(WARN_SECONDS, grace / 2))
    said: Actions = ()
    if why is Why.STOP:
        lines = map(Log, summary.stopping(state, signal_number))
        said = (Note("stop", cause=signal_name(signal_number)), *lines)
    times = state.times._replace(closes=min(state.times.closes, now))
    state = state._replace(ends=state.ends + 1, times=times)
    end = events.EndRanks(state.ends, signal_number, grace, waits=why is Why.STOP)
    state, actions = _if_clear(state, ending, (), now)
    return state, (*said, end, *actions)


def _if_clear(state: State, phase: Ending, before: Actions, now: float) -> Step:
    """Report that nothing of this attempt is left, once that is so and an End commanded it."""
    state = state._replace(phase=phase)
    if phase.open or phase.end_number == LOCAL:
        return state, before
    done = (*before, _report_of_end(state, phase))
    if not (phase.leave_by < math.inf and state.result):
        return state, done
    state, actions = left(state, Leave(state.result), now)
    return state, (*done, *actions)


def _report_of_end(state: State, phase: Ending) -> Cleared:
    """Return what this host reports at the end of its ranks: whether all have handled a stop."""
    message = Cleared(phase.end_number, phase.survivors)
    reached = ranks.got_signal(state.ranks.values())
    if phase.why is not Why.STOP or not reached:
        return message
    if not all(ranks.has_handled(rank, phase.signal_number) for rank in reached):
        return message._replace(handled=-1)
    last = state.times.started + max(rank.ended_at for rank in reached)
    seconds = round(max(0.0, last - state.times.closes), 3)
    return message._replace(handled=len(reached), seconds=seconds)


def cleared(state: State, event: events.KeeperCleared, now: float) -> Step:
    """Note that nothing of a rank is left; give up on processes that survive SIGKILL."""
    phase = state.phase
    if isinstance(phase, Leaving):  # the rank was killed at once
        return state, (events.LeaveRanks(1, (event.rank,)),)
    if not isinstance(phase, Ending) or event.number != state.ends:
        return state, ()
    survivors = phase.survivors + event.survivors
    phase = phase._replace(open=phase.open - {event.rank}, survivors=survivors)
    lines: Actions = ()
    if not phase.open:
        phase = phase._replace(warn_at=math.inf)
        if survivors:
            held = plural(survivors, "process", "es")
            line = f"{held} of the job survived SIGKILL for 5 s (stuck in the kernel)"
            lines = (Log(f"{line}; giving up on them."),)
    return _if_clear(state, phase, lines, now)


def keeper_joined(state: State, event: events.KeeperJoined, now: float) -> Step:
    """Run a rank's script, unless ranks are being ended: then this one has nothing to end."""
    rank = Rank(event.rank, event.local_rank)
    state = state._replace(nproc=event.nproc, ranks={**state.ranks, event.rank: rank})
    phase, note = state.phase, Note("started", event.rank)
    if isinstance(phase, Running):
        if len(state.ranks) == event.nproc:
            state = state._replace(phase=Running())
        if event.group_rank and not state.job.cluster.node_rank:
            return state, (note, causes.of_group_rank(state.job.current_host))
        return state, (note, events.RunRanks((event.rank,)))
    leave = (events.LeaveRanks(1, (event.rank,)),) if isinstance(phase, Leaving) else ()
    return state, (note, *leave)


def keeper_lost(state: State, event: events.KeeperLost, now: float) -> Step:
    """Fail if a rank's keeper was killed; in Leaving it was told to leave."""
    phase, rank = state.phase, state.ranks[event.rank]
    if isinstance(phase, Leaving):
        return state, ()
    others = {number: one for number, one in state.ranks.items() if number != event.rank}
    state = state._replace(ranks=others)
    actions = (_of_killed(state, rank, "its keeper"),) if state.goes_on else ()
    if isinstance(phase, Ending):
        return _if_clear(state, phase._replace(open=phase.open - {event.rank}), actions, now)
    return state, actions


def stub_signalled(state: State, event: events.StubSignalled, now: float) -> Step:
    """Fail: a torchrun that ends its stubs waits for them for 30 s and more; ranks run on.

    If somebody signals all processes of this host, the launcher gets the signal, too: a stop, which
    counts more.
    """
    if not state.goes_on:
        return state, ()
    if event.number == signal.SIGKILL:  # then torchrun signals the others
        return state, (_of_killed(state, state.ranks[event.rank], "its process below torchrun"),)
    if state.torchrun_ends:
        return state, ()
    error = "it was sent a signal, or ends by itself (see this host's log)"
    failure = _of_torchrun(state, now, error=error)._replace(cause=Cause.TORCHRUN_ENDS)
    return state._replace(torchrun_ends=True), (failure,)


def _of_killed(state: State, rank: Rank, what: str) -> Failure:
    return causes.of_killed(named_rank(state.job.current_host, rank.rank, rank.local_rank), what)


# Events of ranks and of torchrun.


def rank_runs(state: State, event: events.RankRuns, now: float) -> Step:
    """Note that a rank's script is about to run."""
    times = state.times._replace(trains=min(state.times.trains, now))
    state = _updated(state._replace(times=times), event, now)
    return state, (Note("runs", event.rank),)


def rank_reports(state: State, event: ranks.RankEvent, now: float) -> Step:
    """Note a rank's event; its failure may count, or its success may complete this host's."""
    state = _updated(state, event, now)
    rank, phase = state.ranks[event.rank], state.phase
    has_ended = isinstance(event, events.RankEnded)
    notes = (Note("ended", rank.rank, exit_code=rank.exit_code),) if has_ended else ()
    if isinstance(phase, Ending) and has_ended:
        return state, (*_ended_while_ending(state, phase, rank, now), *notes)
    if not isinstance(phase, Running):
        return state, notes
    said: Actions = ()
    if has_ended and rank.exit_code == 0:  # that may break a collective of other ranks
        said = (ranks.succeeded(state.ranks, rank, are_all=state.has_succeeded),)
    state, counted = _count(state, now, until=now)
    return state, (*said, *counted, *notes)


def _updated(state: State, event: ranks.RankEvent, now: float) -> State:
    rank = ranks.updated(state.ranks[event.rank], event, now - state.times.started)
    return state._replace(ranks={**state.ranks, rank.rank: rank})


def _count(state: State, now: float, until: float) -> Step:
    """Report the ranks whose failures count until a time."""
    counting, _ = ranks.to_count(state.ranks, until - state.times.started)
    reported = {rank.rank: rank._replace(is_reported=True) for rank in counting}
    state = state._replace(ranks={**state.ranks, **reported})
    return state, tuple(_failure(state, rank, now) for rank in counting)


def _failure(state: State, rank: Rank, now: float) -> Failure:
    age = now - state.times.started - rank.failed_at
    return ranks.failure(rank, state.job.current_host)._replace(age=round(age, 3))


def torchrun_ended(state: State, event: events.TorchrunEnded, now: float) -> Step:
    """Fail if torchrun ended before the job; a program that runs it may fail after a success."""
    phase, state = state.phase, state._replace(torchrun_runs=False)
    if state.job.plan.runner and event.returncode:
        state = state._replace(instead=state.instead or _of_torchrun(state, now, *event).result)
    if state.goes_on:
        if state.job.plan.runner and not event.returncode:
            event = event._replace(error="it ended before torchrun had succeeded")
        counted: Actions = ()
        if isinstance(phase, Running):  # what ranks have said comes before
            state, counted = _count(state, now, until=math.inf)
        return state, (*counted, _of_torchrun(state, now, *event))
    if isinstance(phase, Leaving) and not phase.is_killed:
        return _kill_torchrun(state, phase.why, now)
    return state, ()


def _of_torchrun(
    state: State, now: float, returncode: int = 0, error: str = "", oom: str = ""
) -> Failure:
    seconds, had_ranks = now - state.times.started, bool(state.ranks)
    return causes.of_torchrun(state.job, returncode, error, seconds, oom, had_ranks=had_ranks)


# Events during a stop: they do not change the result.


def _ended_while_ending(state: State, phase: Ending, rank: Rank, now: float) -> Actions:
    """Report a failure; during a stop only log it, or note that the rank has saved."""
    number = phase.signal_number
    if phase.why is not Why.STOP:
        return _report_failure(state, rank, now)
    if rank.response is None:  # nothing else logs it
        return tuple(map(Log, ranks.failed_before((rank,), number, state.job.current_host)))
    if ranks.has_handled(rank, number):
        return (Note("saved", rank.rank),)
    is_ours = rank.exit_code == -signal.SIGKILL and now >= phase.deadline
    if rank.end and not (is_ours or ranks.is_end_of_stop(rank.exit_code, number)):
        line = ranks.failure(rank, state.job.current_host).headline
        return (Log(f"during the stop: {line}."),)
    return ()


def _report_failure(state: State, rank: Rank, now: float) -> Actions:
    """Report a rank that failed before it could be ended, or broken hardware."""
    if not rank.end or rank.is_reported or rank.exit_code == 0:  # a hook may end a rank with 0
        return ()
    failure = _failure(state, rank, now)
    if rank.response is None:
        return (failure,)
    return (failure._replace(cause=Cause.SECONDARY, may_restart=False),) if failure.broken else ()


# Time.


def time_is_up(state: State, event: Time, now: float) -> Step:
    """Do what is due."""
    phase = state.phase
    if isinstance(phase, Running):
        if now >= phase.deadline:
            state = state._replace(phase=Running())
            seconds = state.job.options.start_timeout
            error = f"it has not started all ranks of this host within {seconds:g} s"
            return state, (_of_torchrun(state, now, error=error),)
        return _count(state, now, until=now)
    if isinstance(phase, Leaving) and now >= phase.by:
        if phase.is_killed:
            return state._replace(phase=Done()), ()
        return _kill_torchrun(state, phase.why, now)
    if not isinstance(phase, Ending):
        return state, ()
    if now >= phase.leave_by:
        assert state.result
        return left(state, Leave(state.result), now)  # a keeper is stuck
    if now < phase.warn_at:
        return state, ()
    line = Log(summary.still_running(state, phase.deadline - phase.warn_at))
    state = state._replace(phase=phase._replace(warn_at=math.inf))
    return state, (line, PLACES) if state.alive else ()


# The function for each event; each branches on the phase.
EVENTS: Mapping[type, Callable[[State, Any, float], Step]] = {
    Start: started,
    End: ended,
    Leave: left,
    Alone: alone,
    Failure: cannot_start,
    Stop: signalled,
    events.KeeperJoined: keeper_joined,
    events.KeeperLost: keeper_lost,
    events.StubSignalled: stub_signalled,
    events.KeeperCleared: cleared,
    events.RankRuns: rank_runs,
    events.RankExits: rank_reports,
    events.ThreadRaised: rank_reports,
    events.ScriptEnded: rank_reports,
    events.RankEnded: rank_reports,
    events.TorchrunEnded: torchrun_ended,
    events.NothingLeft: nothing_left,
    Time: time_is_up,
}
