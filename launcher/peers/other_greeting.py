"""Rules of another host than the first: its way to the first one, until that knows it.

Pure.
"""

from __future__ import annotations

import math

from launcher.errors import EXIT_HOST_LOST, EXIT_USAGE
from launcher.events import Log, Time
from launcher.peers import messages
from launcher.peers.events import (
    LINE_EVERY,
    Close,
    Closed,
    Connect,
    Connected,
    Fail,
    Send,
    Unreachable,
)
from launcher.peers.messages import Later, Refused, Welcome
from launcher.peers.other_state import (
    TO_ANSWER,
    P,
    State,
    Step,
    decide,
    leave_if_asked,
    leave_in_time,
    when,
)
from launcher.result.failure_text import of_lost_host
from launcher.text import flag

# All in seconds.
RETRY = 0.02  # between two tries to reach the first host: at first,
RETRY_MOST = 1.0  # and after a while


@when(P.CONNECTING, P.STOPPED, on=Unreachable)
def _retry(state: State, event: Unreachable, now: float) -> Step:
    """Try again after a while, which grows from 0.02 s to 1 s."""
    wait = min(RETRY_MOST, max(RETRY, (now - state.started) / 8))
    return state._replace(trouble=event.trouble), (Connect(wait),)


@when(P.CONNECTING, on=Connected, to=(P.GREETING,))
def _greet(state: State, event: Connected, now: float) -> Step:
    """Say who this host is, and what it has to tell; wait 10 s for the answer."""
    state, actions = _say_hello(state, event)
    return state._replace(phase=P.GREETING, answer_by=now + TO_ANSWER), actions


@when(P.STOPPED, on=Connected)
def _greet_stopped(state: State, event: Connected, now: float) -> Step:
    """Say who this host is, and that it was told to stop."""
    return _say_hello(state, event)


def _say_hello(state: State, event: Connected) -> Step:
    state = state._replace(conn=event.conn, own_address=event.own_address)
    state = state._replace(trouble="it does not answer")
    told = (messages.told(what) for what in state.to_tell)
    sent = [Send(event.conn, message) for message in (messages.hello(state.job), *told)]
    return state, tuple(sent)


@when(P.GREETING, on=Later, to=(P.CONNECTING,))
def _come_again(state: State, event: Later, now: float) -> Step:
    """Close the connection, and try again in a second."""
    state, actions = _try_later(state)
    return state._replace(phase=P.CONNECTING), actions


@when(P.STOPPED, on=Later)
def _come_again_stopped(state: State, event: Later, now: float) -> Step:
    """Close the connection, and try again in a second."""
    return _try_later(state)


def _try_later(state: State) -> Step:
    assert state.conn is not None
    actions = (Close(state.conn, "it has no room yet"), Connect(RETRY_MOST))
    trouble = "it has no room for more connections"
    return state._replace(conn=None, answer_by=math.inf, trouble=trouble), actions


@when(P.GREETING, on=Welcome, to=(P.WAITING,))
def _welcome(state: State, event: Welcome, now: float) -> Step:
    """Wait for the first host to say that all have joined, or how the job ends."""
    return state._replace(phase=P.WAITING, to_tell=(), answer_by=math.inf), ()


@when(P.STOPPED, on=Welcome, to=(P.DECIDED, P.LEFT))
def _stop_is_known(state: State, event: Welcome, now: float) -> Step:
    """Let this host end: the first one knows of the stop."""
    return leave_if_asked(state._replace(phase=P.DECIDED))


@when(P.GREETING, on=Refused, to=(P.LEFT,))
def _refused(state: State, event: Refused, now: float) -> Step:
    """End this launcher: it is not of the first host's job."""
    text = f"the launcher of {state.job.first} refused {state.job.current_host}: {event.why}."
    return state._replace(phase=P.LEFT), (Fail(text, EXIT_USAGE),)


@when(P.STOPPED, on=Refused, to=(P.DECIDED, P.LEFT))
def _refused_stopped(state: State, event: Refused, now: float) -> Step:
    """Let this host end: the first one has refused it."""
    return leave_if_asked(state._replace(phase=P.DECIDED))


@when(P.STOPPED, on=Closed, to=(P.DECIDED, P.LEFT))
def _closed_stopped(state: State, event: Closed, now: float) -> Step:
    """Let this host end: the first one cannot be told of the stop."""
    return leave_if_asked(state._replace(phase=P.DECIDED))


@when(P.GREETING, on=Closed, to=(P.LEFT,))
def _no_launcher(state: State, event: Closed, now: float) -> Step:
    """End this launcher: something else answers in place of the first host's."""
    return _fail(state)


def _fail(state: State) -> Step:
    text = (
        f"what answers on port {state.job.port} of {state.job.first} is not this job's launcher; "
        f"choose another with {flag('peer_port')}, the same one on every host."
    )
    return state._replace(phase=P.LEFT), (Fail(text, EXIT_HOST_LOST),)


@when(P.CONNECTING, P.GREETING, on=Time, to=(P.DECIDED, P.LEFT))
def _remind(state: State, event: Time, now: float) -> Step:
    """Log every 30 s what is missing; end if no answer comes within 10 s or the start timeout."""
    first, timeout = state.job.first, state.job.start_timeout
    if now >= state.answer_by:
        return _fail(state)
    if now >= state.start_by:
        how = f"did not arrive within {timeout} s ({state.trouble})"
        return decide(state, of_lost_host(first, how).result)
    if now >= state.line_at:
        line = Log(f"waiting for {first} ({state.trouble}).")
        state, left = leave_in_time(state._replace(line_at=now + LINE_EVERY), now)
        return state, (line, *left)
    return leave_in_time(state, now)
