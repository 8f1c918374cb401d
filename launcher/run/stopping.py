"""Rules for stops: the ranks save, and get the signal once."""

from __future__ import annotations

import math
import signal

from launcher.errors import AtSignal
from launcher.events import Decided, Log, Stop, Tell
from launcher.result.causes import stopped as stopped_by
from launcher.result.failure_text import headline
from launcher.run.events import (
    Answer,
    Look,
    NoteResponses,
    RankEnded,
    RankFailed,
    RankStarted,
    Responses,
    Signal,
    SignalGroup,
    SignalTorchrun,
    ThirdInterrupt,
    TorchrunAsks,
    TorchrunStarts,
    Why,
)
from launcher.run.state import MARGIN, P, State, Step, answered, enter, to_pass_on, when
from launcher.text import signal_name


def stop(state: State, number: int, now: float) -> Step:
    """Pass a stop on to torchrun, which passes it on to each rank's own process.

    Never to the ranks past it: torchrun takes a rank that ends by itself for a failure.
    """
    grace = state.job.grace
    # If no rank runs there is nothing to wait for: torchrun may be in its exit barrier, which
    # takes no notice of signals.
    by = now + (to_pass_on(grace) if state.alive else MARGIN)
    host = state.job.current_host
    line = f"{signal_name(number)}: stopping; the ranks of {host} have {grace:g} s to save."
    # What the last attempt left behind has no more time than it had.
    leftovers_by = min(now + grace, state.leftovers_by if state.phase is P.CLEARING else math.inf)
    state = enter(state, P.STOPPING, by, leftovers_by=leftovers_by, stop_signal=number)
    state = state._replace(closing=None, killed_at=math.inf)
    return state, (Log(line), Tell(Stop(number)), NoteResponses(number), SignalTorchrun(number))


@when(P.RUNNING, P.RESTARTING, P.CLEARING, on=Signal, to=(P.STOPPING,))
def _stopped(state: State, event: Signal, now: float) -> Step:
    """Stop all hosts: each rank gets the signal once and has its grace to save."""
    return stop(state, event.number, now)


@when(P.ENDING, on=Signal, to=(P.STOPPING,))
def _stopped_while_ending(state: State, event: Signal, now: float) -> Step:
    """Log it: the job is already ending. (If somebody else stopped torchrun, it is a stop.)"""
    if state.closing is Why.STOP and not state.result and not state.failed:
        return stop(state, event.number, now)
    return _only_log(state, event.number)


@when(P.FAILING, P.HOLDING, P.KILLING, on=Signal)
def _stop_comes_late(state: State, event: Signal, now: float) -> Step:
    """Log it: the job is already ending. (If the failure is taken back, it is a stop.)"""
    return _only_log(state._replace(late_stop=event.number), event.number)


@when(P.STOPPING, on=Signal)
def _stopped_again(state: State, event: Signal, now: float) -> Step:
    """Log it: no rank gets a second signal or less time."""
    return _only_log(state, event.number)


def _only_log(state: State, number: int) -> Step:
    name = signal_name(number)
    line = f"{name}: the job is already ending."
    if state.stop_signal:
        line = f"{name} again: the ranks are already stopping and keep their time to save."
    return state, (Log(line),)


@when(P.DRAINING, P.WAITING, on=Signal)
def _stopped_while_others_go_on(state: State, event: Signal, now: float) -> Step:
    """Stop the other hosts if all ranks of this one succeeded; else log it."""
    if state.job.has_peers and state.returncode == 0 and not (state.result or state.stop_signal):
        line = f"{signal_name(event.number)} while the other hosts go on: stopping them."
        return state, (Log(line), Tell(Stop(event.number)))
    return _only_log(state, event.number)


@when(
    *(P.RUNNING, P.FAILING, P.HOLDING, P.ENDING, P.STOPPING, P.RESTARTING, P.CLEARING, P.KILLING),
    on=ThirdInterrupt,
    to=(P.KILLING,),
)
def _third_interrupt(state: State, event: ThirdInterrupt, now: float) -> Step:
    """Kill the whole job at once."""
    return enter(state, P.KILLING, told=frozenset()), (Log(_AT_ONCE), Look())


@when(P.DRAINING, on=ThirdInterrupt)
def _third_interrupt_at_the_end(state: State, event: ThirdInterrupt, now: float) -> Step:
    """Kill at once what the ranks left behind."""
    return state._replace(leftovers_by=now), (Log(_AT_ONCE), Look())


@when(P.JOINING, P.LEAVING, P.WAITING, on=ThirdInterrupt, to=(P.DONE,))
def _third_interrupt_without_ranks(state: State, event: ThirdInterrupt, now: float) -> Step:
    """End at once: the other hosts cannot be waited for."""
    own = state.failure.result if state.failure else stopped_by(signal.SIGINT)
    line = "SIGINT for the third time within 2 s: ending at once."
    return enter(state, P.DONE, result=state.result or own), (Log(line),)


_AT_ONCE = "SIGINT for the third time within 2 s: killing the job at once."


@when(P.STOPPING, on=Responses)
def _responses(state: State, event: Responses, now: float) -> Step:
    """Pass Ctrl-C on to what a rank has started, if the rank itself ignores it.

    os.system ignores it while it waits for another program, which should get it.
    """
    noted = {
        pid: rank._replace(at_stop=event.at_stop.get(pid, rank.at_stop))
        for pid, rank in state.ranks.items()
    }
    number = state.stop_signal
    ignoring = [pid for pid, what in event.at_stop.items() if what is AtSignal.IGNORES]
    if number not in (signal.SIGINT, signal.SIGQUIT):
        ignoring = []
    return state._replace(ranks=noted), tuple(SignalGroup(pid, number) for pid in ignoring)


@when(P.STOPPING, on=RankStarted)
def _started_after_the_stop(state: State, event: RankStarted, now: float) -> Step:
    """Give a rank that started after the stop its whole grace to save."""
    by = now + state.job.grace
    # torchrun tells one that it has started since it asked, too.
    deadline = by + MARGIN if state.closing else now + to_pass_on(state.job.grace)
    return state._replace(deadline=deadline, leftovers_by=by), ()


@when(P.STOPPING, P.DRAINING, on=RankFailed)
def _failed_while_stopping(state: State, event: RankFailed, now: float) -> Step:
    """Log it; if the rank died of the stop unsaved, pass the stop on to what it started."""
    rank = state.ranks[event.pid]
    number = state.stop_signal
    if not number:
        return state, ()
    # If torchrun was killed, DRAINING has sent SIGTERM.
    if rank.exit_code in (-number, -signal.SIGTERM):
        # Python's own handler of SIGINT saves nothing.
        if rank.at_stop is not AtSignal.HANDLES or number == signal.SIGINT:
            # Nothing of it is saved: it may be that it only started another program, which has not
            # got the signal yet.
            return state, (SignalGroup(rank.pid, number),)
    elif rank.failure and rank.exit_code not in (None, 0, 128 + number):
        return state, (Log(f"while stopping: {headline(rank.failure, state.job.current_host)}."),)
    return state, ()


@when(P.STOPPING, on=RankEnded)
def _ended_while_stopping(state: State, event: RankEnded, now: float) -> Step:
    """Once no rank runs, give torchrun 5 s to end: it may be waiting for other hosts."""
    if state.alive:
        return state, ()
    return state._replace(deadline=now + MARGIN), ()


@when(P.STOPPING, on=Decided)
def _decided_while_stopping(state: State, event: Decided, now: float) -> Step:
    """Note the result: the ranks keep their whole grace."""
    return state, ()


@when(P.STOPPING, on=TorchrunAsks)
def _torchrun_stops(state: State, event: TorchrunAsks, now: float) -> Step:
    """Let torchrun end the ranks, with their whole grace."""
    error = event.error or state.torchrun_error
    state = answered(state)._replace(closing=event.why, closing_at=now, torchrun_error=error)
    return state._replace(deadline=state.leftovers_by + MARGIN), (Answer(state.job.grace),)


@when(P.STOPPING, P.ENDING, on=TorchrunStarts)
def _starts_while_ending(state: State, event: TorchrunStarts, now: float) -> Step:
    """Let torchrun go on: it was told to end, and does so first."""
    return state, (Answer(),)
