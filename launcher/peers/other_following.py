"""Rules of another host than the first: what it tells, and how it ends as the first one decides.

Pure.
"""

from __future__ import annotations

from launcher.events import AllJoined, Decided, Leave, Left, Log, Stop, Succeeded, Time
from launcher.peers import messages
from launcher.peers.events import TO_LEAVE, Closed, Send
from launcher.peers.messages import AllHere, Ends, Missing
from launcher.peers.other_state import P, State, Step, decide, leave_in_time, when
from launcher.result.causes import Failure, stopped
from launcher.result.failure_text import of_lost_host

# What the first host says


@when(P.WAITING, on=Missing)
def _missing(state: State, event: Missing, now: float) -> Step:
    """Log who is missing."""
    return state, (Log(f"waiting for {event.hosts}."),)


@when(P.WAITING, on=AllHere, to=(P.JOINED,))
def _all_here(state: State, event: AllHere, now: float) -> Step:
    """Start torchrun: all have joined."""
    return state._replace(phase=P.JOINED), (AllJoined(state.own_address),)


@when(P.WAITING, P.JOINED, on=Ends, to=(P.DECIDED, P.LEFT))
def _end(state: State, event: Ends, now: float) -> Step:
    """End as the first host has decided."""
    return decide(state, event.result)


@when(P.WAITING, P.JOINED, on=Closed, to=(P.DECIDED, P.LEFT))
def _lose(state: State, event: Closed, now: float) -> Step:
    """End: the first host is lost, and torchrun's store with it."""
    result = of_lost_host(state.job.first, f"was lost: {event.why}").result
    return decide(state, result, store_is_lost=True)


# What this host says


@when(P.CONNECTING, P.GREETING, on=Failure)
def _fail_early(state: State, event: Failure, now: float) -> Step:
    """Tell the first host: now if it is connected, and with each hello until it answers."""
    return _tell_again(state, event)


@when(P.JOINED, on=Succeeded)
def _succeed(state: State, event: Succeeded, now: float) -> Step:
    """Tell the first host, which from now on may decide that the job has succeeded."""
    return _tell(state._replace(succeeded=True), event)


@when(P.WAITING, P.JOINED, on=Failure)
def _fail(state: State, event: Failure, now: float) -> Step:
    """Tell the first host, which decides."""
    return _tell(state, event)


@when(P.WAITING, P.JOINED, on=Stop)
def _stop(state: State, event: Stop, now: float) -> Step:
    """Tell the first host, which decides."""
    return _tell(state, event)


def _tell(state: State, what: Failure | Stop | Succeeded) -> Step:
    return state, () if state.conn is None else (Send(state.conn, messages.told(what)),)


def _tell_again(state: State, what: Failure | Stop) -> Step:
    state, actions = _tell(state, what)
    return state._replace(to_tell=(*state.to_tell, what)), actions


@when(P.CONNECTING, P.GREETING, on=Stop, to=(P.STOPPED,))
def _stop_early(state: State, event: Stop, now: float) -> Step:
    """Stop this host, without an answer of the first one; a failure before it counts."""
    state, actions = _tell_again(state, event)
    if any(isinstance(what, Failure) for what in state.to_tell):
        return state, actions
    return state._replace(phase=P.STOPPED), (*actions, Decided(stopped(event.number)))


@when(P.CONNECTING, P.GREETING, P.WAITING, P.JOINED, P.STOPPED, on=Leave)
def _leave(state: State, event: Leave, now: float) -> Step:
    """End this launcher once it knows the result and the first host the stop, or after 3 s."""
    return state._replace(leave_by=min(state.leave_by, now + TO_LEAVE)), ()


@when(P.DECIDED, on=Leave, to=(P.LEFT,))
def _leave_at_once(state: State, event: Leave, now: float) -> Step:
    """Let this host end."""
    return state._replace(phase=P.LEFT), (Left(),)


@when(P.WAITING, P.JOINED, P.STOPPED, on=Time, to=(P.LEFT,))
def _time_to_leave(state: State, event: Time, now: float) -> Step:
    """If this host cannot start, or was stopped, end its launcher after 3 s."""
    return leave_in_time(state, now)
