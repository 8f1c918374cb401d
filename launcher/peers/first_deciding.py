"""Rules of the first host on how the job ends: which failure counts, and who knows of it.

Pure.
"""

from __future__ import annotations

from launcher.events import Leave, Time
from launcher.peers import first_pending
from launcher.peers.events import TO_LEAVE, HostFailed, HostLost, HostStopped, HostSucceeded
from launcher.peers.first_state import (
    P,
    State,
    Step,
    cause,
    decide,
    leave_if_told,
    leave_in_time,
    note,
    when,
)
from launcher.result.causes import Cause, Result, stopped
from launcher.result.failure_text import of_lost_host


@when(P.JOINING, P.CANCELLING, on=HostFailed, to=(P.CANCELLING,))
def _cancel(state: State, event: HostFailed, now: float) -> Step:
    """Wait for a better cause, 0.3 s to 3 s by the cause; hosts can still join."""
    if event.failure.cause is Cause.RESTARTED:
        return state, ()  # nothing runs yet that could be restarted
    return note(state, event.failure, now)._replace(phase=P.CANCELLING), ()


@when(P.JOINED, P.FAILING, on=HostFailed, to=(P.FAILING,))
def _fail(state: State, event: HostFailed, now: float) -> Step:
    """Wait for a better cause, 0.3 s to 3 s by the cause; only note what torchrun restarts."""
    state = note(state, event.failure, now)
    return state._replace(phase=P.FAILING if state.failure else P.JOINED), ()


@when(P.JOINING, P.CANCELLING, on=HostLost, to=(P.CANCELLING,))
def _lose_early(state: State, event: HostLost, now: float) -> Step:
    """Wait 0.5 s for a better cause than a lost host."""
    return _note_lost(state, event, now)._replace(phase=P.CANCELLING), ()


@when(P.JOINED, P.FAILING, on=HostLost, to=(P.FAILING,))
def _lose(state: State, event: HostLost, now: float) -> Step:
    """Wait 0.5 s for a better cause than a lost host."""
    return _note_lost(state, event, now)._replace(phase=P.FAILING), ()


@when(P.CANCELLED, P.DECIDED, on=HostLost)
def _forget(state: State, event: HostLost, now: float) -> Step:
    """Forget the host: it knows the result."""
    return _without(state, event.host), ()


def _note_lost(state: State, event: HostLost, now: float) -> State:
    state = _without(state, event.host)
    return note(state, of_lost_host(event.host, f"was lost: {event.why}"), now)


def _without(state: State, host: str) -> State:
    joined, hosts = dict(state.joined), dict(state.hosts)
    del hosts[joined.pop(host).conn]
    return state._replace(joined=joined, hosts=hosts)


@when(P.JOINING, on=HostStopped, to=(P.CANCELLED,))
@when(P.JOINED, on=HostStopped, to=(P.DECIDED,))
def _stop(state: State, event: HostStopped, now: float) -> Step:
    """Stop all hosts."""
    return decide(state, stopped(event.number))


@when(P.CANCELLING, P.FAILING, on=HostStopped)
def _stop_comes_late(state: State, event: HostStopped, now: float) -> Step:
    """Nothing: the failure that came first is the result."""
    return state, ()


@when(P.JOINED, P.FAILING, on=HostSucceeded, to=(P.DECIDED, P.LEFT))
def _succeed(state: State, event: HostSucceeded, now: float) -> Step:
    """Count the host: the job has succeeded when all hosts have."""
    state = state._replace(succeeded=state.succeeded | {event.host})
    if len(state.succeeded) < len(state.job.hosts):
        return state, ()
    return decide(state, Result(0))


@when(P.CANCELLING, on=Time, to=(P.CANCELLED, P.LEFT))
def _time_to_cancel(state: State, event: Time, now: float) -> Step:
    """Decide: no better cause has come. If this host cannot start, end its launcher after 3 s."""
    pending, actions = first_pending.tick(state.pending, now)
    state, decided = _decide_in_time(state._replace(pending=pending), now)
    return state, actions + decided


@when(P.FAILING, on=Time, to=(P.DECIDED, P.LEFT))
def _time_to_decide(state: State, event: Time, now: float) -> Step:
    """Decide: no better cause has come. If this host cannot start, end its launcher after 3 s."""
    return _decide_in_time(state, now)


def _decide_in_time(state: State, now: float) -> Step:
    if now >= state.decide_at:
        return decide(state, cause(state).result)
    return leave_in_time(state, now)


@when(P.CANCELLED, on=Time, to=(P.LEFT,))
def _time_to_tell(state: State, event: Time, now: float) -> Step:
    """Close connections that have not said hello after 4 s; end this launcher after its 3 s."""
    pending, actions = first_pending.tick(state.pending, now)
    state, left = leave_in_time(state._replace(pending=pending), now)
    return state, actions + left


@when(P.CANCELLING, P.FAILING, on=Leave)
def _leave(state: State, event: Leave, now: float) -> Step:
    """End this launcher once all hosts know the result, or after 3 s."""
    return _leaving(state, now), ()


@when(P.CANCELLED, P.DECIDED, on=Leave, to=(P.LEFT,))
def _leave_decided(state: State, event: Leave, now: float) -> Step:
    """End this launcher: now if all hosts know the result, else once they do or after 3 s."""
    return leave_if_told(_leaving(state, now))


def _leaving(state: State, now: float) -> State:
    return state._replace(leave_by=min(state.leave_by, now + TO_LEAVE))
