"""Every other host than the coordinator: it joins, reports, and does what is commanded.

    state, actions = step(state, event, now)

Until the coordinator has welcomed this host, all is this host's own matter: it tries again and
again to reach it, sends with each hello all that it has to report, and acts on a stop by itself.
From then on reports go up and commands down as they come, and only the coordinator decides, but for
two things: a success is not believed that this host has not had, and a lost coordinator ends this
host. What bounds each wait: Connecting, the start timeout; Greeting, 10 s besides; Joined, the
channel, which finds a coordinator that is lost (channel.py).

EVENTS, COMMANDS have the function that takes an event, or a message of the coordinator; rows.py has
all changes of phase. Times are on the clock time.monotonic(), waits in seconds. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Union

from launcher.job.job import Job
from launcher.peers.coordinator import LOG_MISSING_SECONDS
from launcher.peers.events import (
    CLOSED,
    NO_MESSAGE,
    Action,
    AllKnow,
    Command,
    Connect,
    Connected,
    Disconnect,
    Lost,
    Received,
    Report,
    Time,
    Unreachable,
)
from launcher.peers.messages import (
    AllStacks,
    CollectStacks,
    End,
    Failed,
    FromMember,
    Later,
    Missing,
    NoRanksAnywhere,
    Refused,
    Restart,
    Start,
    Stop,
    Succeeded,
    Welcome,
    checked,
    hello,
)
from launcher.result.causes import Result, no_launcher, of_host, of_lost_host, stopped
from launcher.text.words import Log, lasted

WELCOME_SECONDS = 10  # for the coordinator to welcome this host, or refuse it
AT_ONCE_SECONDS = 1  # in which it does so, if it does not stand still
# Between two tries to reach the coordinator: at first, and after a while.
RETRY_SECONDS, MOST_RETRY_SECONDS = 0.02, 1.0

# Phases.


class Connecting(NamedTuple):
    """This host tries to reach the coordinator."""

    trouble: str = "its name has not been resolved yet"


class Greeting(NamedTuple):
    """This host has sent its hello; it waits for the coordinator's reply."""

    deadline: float


class Joined(NamedTuple):
    """The coordinator has welcomed this host."""


class Ended(NamedTuple):
    """This host knows how the job ends."""


MemberPhase = Union[Connecting, Greeting, Joined, Ended]


class MemberState(NamedTuple):
    """All that is known."""

    job: Job
    phase: MemberPhase
    began: float
    log_missing_at: float
    reports: tuple[FromMember, ...] = ()  # sent with each hello, until this host is welcome
    was_closed: bool = False  # what took the last connection, at once and without a reply
    attempt: int = 0  # that this host was to start
    succeeded: int = 0  # the attempt in which all ranks of this host have succeeded
    stop_signal: int = 0  # that this host was sent


MemberStep = tuple[MemberState, tuple[Action, ...]]


def begin(job: Job, now: float) -> MemberStep:
    """Return the state at the launcher's start, and the actions to carry out."""
    return MemberState(job, Connecting(), now, now + LOG_MISSING_SECONDS), (Connect(0),)


def due(state: MemberState) -> float:
    """Return when the event Time is due; infinite: never, as while ranks run."""
    if not isinstance(state.phase, (Connecting, Greeting)):
        return math.inf  # once welcome, only the coordinator's timeouts count
    start_deadline = state.began + state.job.options.start_timeout
    reply_deadline = state.phase.deadline if isinstance(state.phase, Greeting) else math.inf
    return min(state.log_missing_at, start_deadline, reply_deadline)


def step(state: MemberState, event: Any, now: float) -> MemberStep:
    """Return the state after an event, and the actions to carry out."""
    if isinstance(event, Received):
        if event.host == state.job.current_host:
            return reported(state, event.message)
        receive = COMMANDS.get(type(event.message))
        if receive is not None:
            if isinstance(state.phase, Ended) and receive is not pass_on:
                return state, ()
            return receive(state, event.message)
        event = event.message
    take = EVENTS.get(type(event))
    if take is None:
        return state, (Log(f"a member does not know {type(event).__name__}."),)
    return take(state, event, now)


# Until the coordinator has welcomed this host.


def unreachable(state: MemberState, event: Unreachable, now: float) -> MemberStep:
    """Try again after a while, which grows from 0.02 s to 1 s; not where it was disconnected."""
    if not isinstance(state.phase, Connecting):
        return state, ()
    if state.was_closed:
        how = f"was lost: it closed the connection before it answered, and now {event.trouble}"
        return _end_host(state, of_lost_host(state.job.coordinator, how).result)
    seconds = min(MOST_RETRY_SECONDS, max(RETRY_SECONDS, (now - state.began) / 8))
    return state._replace(phase=Connecting(event.trouble)), (Connect(seconds),)


def connected(state: MemberState, event: Connected, now: float) -> MemberStep:
    """Send who this host is, and what it has to report."""
    state = state._replace(phase=Greeting(now + WELCOME_SECONDS))
    return state, tuple(Report(message) for message in (hello(state.job), *state.reports))


def welcome(state: MemberState, message: Welcome) -> MemberStep:
    """Have joined: from now on, the coordinator decides."""
    has_reported_stop = any(isinstance(report, Stop) for report in state.reports)
    state = state._replace(phase=Joined(), reports=())
    return state, (Command(AllKnow()),) if has_reported_stop else ()


def later(state: MemberState, message: Later) -> MemberStep:
    """Try again: the coordinator has no room now."""
    phase = Connecting("it cannot take more connections now")
    state = state._replace(phase=phase, was_closed=False)
    return state, (Disconnect(state.job.coordinator), Connect(MOST_RETRY_SECONDS))


def refused(state: MemberState, message: Refused) -> MemberStep:
    """End: the coordinator waits for no such host."""
    job = state.job
    text = f"the launcher of {job.coordinator} refused {job.current_host}: {message.why.value}."
    return _end_host(state, of_host(f"launcher: {text}").result)


def time_is_up(state: MemberState, event: Time, now: float) -> MemberStep:
    """Log every 30 s what is missing; end if no reply comes in time."""
    job, phase = state.job, state.phase
    if now < due(state):
        return state, ()
    if isinstance(phase, Greeting) and now >= phase.deadline:
        return _no_reply(state, "", WELCOME_SECONDS)
    trouble = phase.trouble if isinstance(phase, Connecting) else "it does not answer"
    if now >= state.began + job.options.start_timeout:
        how = f"could not be reached within {job.options.start_timeout:g} s ({trouble})"
        return _end_host(state, of_lost_host(job.coordinator, how).result)
    line = Log(f"waiting for {job.coordinator} ({trouble}).")
    return state._replace(log_missing_at=now + LOG_MISSING_SECONDS), (line,)


def _no_reply(state: MemberState, why: str, seconds: float) -> MemberStep:
    """End: something else listens there, or the coordinator has ended; one more try tells which."""
    where = f"on port {state.job.options.peer_port} of {state.job.coordinator}"
    if why == NO_MESSAGE:
        seen = f"the program that answers {where} is not this job's launcher"
    elif seconds >= AT_ONCE_SECONDS:
        seen = f"the program that listens {where} has not answered as a launcher in "
        seen += f"{lasted(seconds)}: it is not this job's launcher, or that launcher is suspended"
    elif state.was_closed:
        seen = (
            f"the program that listens {where} closes connections without answering: it is "
            "not this job's launcher"
        )
    else:
        phase = Connecting("it closed the connection before it answered")
        return state._replace(phase=phase, was_closed=True), (Connect(AT_ONCE_SECONDS),)
    return _end_host(state, no_launcher(seen).result)


# Up and down.


def reported(state: MemberState, message: Any) -> MemberStep:
    """Pass a report of this host's own on; before it is welcome, a stop is decided here."""
    if isinstance(message, Failed):
        message = message._replace(failure=checked(message.failure, state.job.current_host))
    if isinstance(message, Succeeded):
        state = state._replace(succeeded=message.attempt)
    if isinstance(message, Stop):
        state = state._replace(stop_signal=message.number)
    if isinstance(state.phase, (Joined, Ended)):
        return state, (Report(message),)
    failed_before = any(isinstance(report, Failed) for report in state.reports)
    state = state._replace(reports=(*state.reports, message))
    report = (Report(message),) if isinstance(state.phase, Greeting) else ()
    if isinstance(message, Stop) and not failed_before:
        return state, (*report, Command(End(stopped(message.number))))
    return state, report


def missing(state: MemberState, message: Missing) -> MemberStep:
    """Log which hosts are missing."""
    return state, (Log(f"waiting for {message.words}."),)


def start(state: MemberState, message: Start) -> MemberStep:
    """Have this host start the ranks of an attempt."""
    state = state._replace(phase=Joined(), attempt=message.attempt, succeeded=0)
    return state, (Command(message),)


def restart(state: MemberState, message: Restart) -> MemberStep:
    """Have this host end its ranks."""
    return state, (Command(message),)


def end(state: MemberState, message: End) -> MemberStep:
    """Have this host end; that the job has succeeded is true only if this host has."""
    if message.result.exit_code == 0 and not state.succeeded:
        return state, ()
    return _end_host(state, message.result)


def pass_on(state: MemberState, message: Any) -> MemberStep:
    """Have this host do what may be commanded also after the end."""
    return state, (Command(message),)


def coordinator_lost(state: MemberState, event: Lost, now: float) -> MemberStep:
    """End: without the coordinator nobody decides, and torchrun's store is lost with it."""
    job = state.job
    if isinstance(state.phase, Ended):
        return state, ()
    if isinstance(state.phase, Greeting) and event.why in (CLOSED, NO_MESSAGE):
        return _no_reply(state, event.why, WELCOME_SECONDS - (state.phase.deadline - now))
    if state.stop_signal:
        return _end_host(state, stopped(state.stop_signal))  # which came first
    lost = of_lost_host(job.coordinator, f"was lost: {event.why}")
    state, actions = _end_host(state, lost.result)
    # If it was only suspended, it ends with the same when it continues.
    return state, (Report(Failed(state.attempt, lost)), *actions)


def _end_host(state: MemberState, result: Result) -> MemberStep:
    """Have this host end with a result: no other has to learn it from this one."""
    return state._replace(phase=Ended()), (Command(End(result)), Command(AllKnow()))


EVENTS: Mapping[type, Callable[[MemberState, Any, float], MemberStep]] = {
    Unreachable: unreachable,
    Connected: connected,
    Lost: coordinator_lost,
    Time: time_is_up,
}
COMMANDS: Mapping[type, Callable[[MemberState, Any], MemberStep]] = {
    Welcome: welcome,
    Later: later,
    Refused: refused,
    Missing: missing,
    Start: start,
    Restart: restart,
    End: end,
    NoRanksAnywhere: pass_on,
    CollectStacks: pass_on,
    AllStacks: pass_on,
}
