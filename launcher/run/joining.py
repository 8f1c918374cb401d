"""Rules for the start: all hosts join, or this one ends without having started anything."""

from __future__ import annotations

from launcher.events import AllJoined, Decided, Leave, Left, Stop, Tell
from launcher.result.causes import stopped
from launcher.run.events import CannotStart, Signal, Start
from launcher.run.state import P, State, Step, enter, when


@when(P.JOINING, on=AllJoined, to=(P.RUNNING,))
def _all_joined(state: State, event: AllJoined, now: float) -> Step:
    """Start torchrun."""
    start = Start(event.own_address, event.name_leads_here)
    return enter(state, P.RUNNING, started=now), (start,)


@when(P.JOINING, on=Signal, to=(P.DONE,))
def _stopped_before_the_start(state: State, event: Signal, now: float) -> Step:
    """Stop the other hosts as well; a host that is alone ends at once."""
    if state.job.has_peers:
        return state, (Tell(Stop(event.number)),)
    return enter(state, P.DONE, result=stopped(event.number)), ()


@when(P.JOINING, P.RUNNING, on=CannotStart, to=(P.LEAVING, P.DONE))
def _cannot_start(state: State, event: CannotStart, now: float) -> Step:
    """Tell the other hosts why this one cannot start; a host that is alone ends at once."""
    if not state.job.has_peers:
        return enter(state, P.DONE, failure=event.failure, result=event.failure.result), ()
    state = enter(state, P.LEAVING, failure=event.failure)
    return state, (Tell(event.failure), Tell(Leave()))


@when(P.JOINING, on=Decided, to=(P.LEAVING,))
def _decided_before_the_start(state: State, event: Decided, now: float) -> Step:
    """Start nothing; end once the other hosts know the result."""
    return enter(state, P.LEAVING), (Tell(Leave()),)


@when(P.LEAVING, on=Signal)
def _stopped_while_leaving(state: State, event: Signal, now: float) -> Step:
    """Stop the other hosts, unless it is decided already how the job ends."""
    return state, (Tell(Stop(event.number)),)


@when(P.LEAVING, on=Left, to=(P.DONE,))
def _left(state: State, event: Left, now: float) -> Step:
    """End with the job's result; if there is none, with what was wrong on this host."""
    own = state.failure.result if state.failure else None
    return enter(state, P.DONE, result=state.result or own), ()
