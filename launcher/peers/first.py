"""The first host's part of the agreement: who is here, what must agree, which failure counts.

Pure: an event and the time go in, a new state and actions come out.
"""

from __future__ import annotations

import math
from typing import Any

from launcher.events import Leave, Stop, Succeeded, Tell
from launcher.peers import first_deciding, first_joining, first_missing, messages
from launcher.peers.events import (
    TO_LEAVE,
    Closed,
    HelloFrom,
    HostFailed,
    HostLost,
    HostStopped,
    HostSucceeded,
    Job,
    Listen,
    NoHello,
    Received,
)
from launcher.peers.first_pending import PendingConnections
from launcher.peers.first_state import OPEN, RULES, P, State, Step, expect_why
from launcher.result.causes import Failure

RULE_FILES = (first_joining, first_deciding)  # they register their rules with RULES


def begin(job: Job, now: float) -> Step:
    """Return the state at the launcher's start, and the actions to carry out."""
    pending = PendingConnections(now + min(TO_LEAVE, job.start_timeout))
    state = State(job, P.JOINING, pending, first_missing.begin(job, now))
    if not job.fingerprint:
        state = expect_why(state, job.current_host, now)
    return state, (Listen(),)


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while all ranks run."""
    if state.phase is P.LEFT:
        return math.inf
    due = min(state.decide_at, state.leave_by)
    if state.phase in OPEN:
        due = min(due, state.pending.due)
    return min(due, state.reminder.due) if state.phase is P.JOINING else due


def step(state: State, event: Any, now: float) -> Step:
    """Return the state after an event, and the actions to carry out."""
    return RULES.step(state, meaning(state, event), now)


def meaning(state: State, event: Any) -> Any:
    """Return what an event says of a host, as the rules have it; None for nothing."""
    if isinstance(event, Tell):
        return _told(state.job.current_host, event.what)
    if isinstance(event, (Received, Closed)) and event.conn not in state.pending.connections:
        host = state.hosts.get(event.conn)
        if host is None:
            return None  # it was closed by what came before it
        if isinstance(event, Closed):
            return HostLost(host, event.why)
        try:
            return _told(host, messages.told_in(event.message))
        except ValueError:
            return None  # messages that are not valid are ignored
    if isinstance(event, Received):
        try:
            return HelloFrom(event.conn, *messages.hello_in(event.message))
        except ValueError:
            return NoHello(event.conn)
    return event


def _told(host: str, what: Failure | Stop | Succeeded | Leave) -> Any:
    if isinstance(what, Failure):
        return HostFailed(host, messages.valid(what, host))
    if isinstance(what, Stop):
        return HostStopped(host, what.number)
    return HostSucceeded(host) if isinstance(what, Succeeded) else what
