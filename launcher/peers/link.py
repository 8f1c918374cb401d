"""A member's connection to the coordinator: it joins, reports, and obeys commands.

    state, actions = step(state, event, now)

Until the coordinator has welcomed this host (Joining), the channel keeps trying to reach it, and
all reports are sent with each hello. The host waits for the reply as long as the connection lasts:
a slow coordinator has the hello, and would take a second one for another host's. Another program
that listens in its place does not matter. From then on (Joined) reports go up, commands come down,
and only the coordinator decides. If the coordinator is lost, or was never reached, this host's run
ends by itself: Left.

Timeouts: Joining, the start timeout, or a few seconds after a stop or an error. Joined: the
channel, which detects a lost coordinator (channel.py). Times are on the clock System.now(), waits
in seconds. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Union

from launcher.job.job import Job
from launcher.peers import events, messages
from launcher.result.causes import Failure, of_lost_host
from launcher.text.words import Log, other_port

# For a host that has been stopped, or cannot start, to tell the coordinator.
_UNHEARD_SECONDS: Mapping[type, float] = {messages.Stop: 3.0, Failure: 5.0}

# Phases.


class Joining(NamedTuple):
    """This host tries to reach the coordinator; `trouble` is why it has not been welcomed yet."""

    deadline: float
    log_missing_at: float
    trouble: str = "its name has not been resolved yet"
    reports: tuple[messages.FromMember, ...] = ()  # sent with each hello


class Joined(NamedTuple):
    """The coordinator has welcomed this host."""


class Left(NamedTuple):
    """This host's run has been told to leave: by the coordinator, or because it is lost."""


Phase = Union[Joining, Joined, Left]


class LinkState(NamedTuple):
    """The member's state."""

    job: Job
    phase: Phase


LinkStep = tuple[LinkState, tuple[events.Action, ...]]


def begin(job: Job, now: float) -> LinkState:
    """Return the state at the launcher's start."""
    joining = Joining(now + job.options.start_timeout, now + events.LOG_MISSING_SECONDS)
    return LinkState(job, joining)


def due(state: LinkState) -> float:
    """Return when the event Time is due; infinite: never, as while ranks run."""
    phase = state.phase
    if not isinstance(phase, Joining):
        return math.inf  # only the coordinator's timeouts count
    return min(phase.log_missing_at, phase.deadline)


def step(state: LinkState, event: Any, now: float) -> LinkStep:
    """Return the state after an event, and the actions to carry out."""
    if not isinstance(event, events.Received):
        return EVENTS[type(event)](state, event, now)
    if event.host == state.job.current_host:
        return reported(state, event.message, now)
    if isinstance(state.phase, Joining):  # nothing else is a reply
        is_reply = isinstance(event.message, messages.Welcome)
        return (state._replace(phase=Joined()) if is_reply else state), ()
    return commanded(state, event.message) if isinstance(state.phase, Joined) else (state, ())


# Until the coordinator has welcomed this host.


def tried(state: LinkState, event: events.Tried, now: float) -> LinkStep:
    """Send this host's hello and its reports, if there is a connection."""
    phase = state.phase
    if not isinstance(phase, Joining):
        return state, ()
    if event.trouble:
        return state._replace(phase=phase._replace(trouble=event.trouble)), ()
    reports = (_report(state, message) for message in (messages.hello(state.job), *phase.reports))
    port = state.job.options.peer_port
    seen = f"what listens on port {port} there does not answer as this job's launcher"
    joining = phase._replace(trouble=f"{seen}; {other_port('peer_port')}")
    return state._replace(phase=joining), tuple(reports)


def time_is_up(state: LinkState, event: events.Time, now: float) -> LinkStep:
    """Log every 30 s that the coordinator is missing; end if no reply comes in time."""
    phase, job = state.phase, state.job
    if not isinstance(phase, Joining) or now < due(state):
        return state, ()
    if now >= phase.deadline:
        how = f"could not be reached within {job.options.start_timeout:g} s ({phase.trouble})"
        lost = of_lost_host(job.coordinator, how)
        return state._replace(phase=Left()), (events.Alone(lost),)
    state = state._replace(phase=phase._replace(log_missing_at=now + events.LOG_MISSING_SECONDS))
    return state, (Log(f"waiting for {job.coordinator} ({phase.trouble})."),)


# Up and down.


def reported(state: LinkState, message: Any, now: float) -> LinkStep:
    """Forward this host's own report."""
    phase, actions = state.phase, (_report(state, message),)
    if isinstance(phase, Left):
        return state, ()
    if isinstance(phase, Joining):  # with each hello again
        deadline = min(phase.deadline, now + _UNHEARD_SECONDS.get(type(message), math.inf))
        phase = phase._replace(reports=(*phase.reports, message), deadline=deadline)
    return state._replace(phase=phase), actions


def commanded(state: LinkState, message: Any) -> LinkStep:
    """Pass a command to this host's run."""
    if isinstance(message, messages.Welcome):
        return state, (Log(f"waiting for {message.missing}."),)
    if isinstance(message, messages.Leave):
        state = state._replace(phase=Left())
    return state, (events.Send((state.job.current_host,), message),)


def coordinator_lost(state: LinkState, event: events.Lost, now: float) -> LinkStep:
    """End: nobody else decides, and torchrun's store is lost with the coordinator."""
    if not isinstance(state.phase, Joined):  # another program, or a coordinator without room
        return state, ()
    lost = of_lost_host(state.job.coordinator, f"was lost: {event.why}")
    # If it was only suspended, it ends with the same result when it continues.
    return state._replace(phase=Left()), (_report(state, lost), events.Alone(lost))


def _report(state: LinkState, message: messages.Hello | messages.FromMember) -> events.Send:
    return events.Send((state.job.coordinator,), message)


EVENTS: Mapping[type, Callable[[LinkState, Any, float], LinkStep]] = {
    events.Tried: tried,
    events.Lost: coordinator_lost,
    events.Time: time_is_up,
}
