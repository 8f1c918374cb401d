"""Every other host than the coordinator: it joins, tells, and is told how the job goes on.

    state, actions = step(state, event, now)

Times are on the clock time.monotonic(), waits in seconds. Pure.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Union

from launcher.peers.coordinator import LINE_EVERY
from launcher.peers.events import (
    HUNG_UP,
    NO_MESSAGE,
    AllKnow,
    Connect,
    Connected,
    HangUp,
    Lost,
    Received,
    Say,
    Tell,
    Unreachable,
)
from launcher.peers.messages import (
    AllStacks,
    CollectStacks,
    End,
    Failed,
    Job,
    Later,
    Message,
    Missing,
    NoRanksAnywhere,
    Refused,
    Start,
    Stop,
    Succeeded,
    Welcome,
    checked,
    hello,
)
from launcher.result.causes import Result, no_launcher, of_host, of_lost_host, stopped
from launcher.text.words import Log, lasted

# All in seconds.
WELCOME_SECONDS = 10  # for the coordinator to welcome this host, or refuse it
AT_ONCE = 1  # in which it does so, if it does not stand still
RETRY = 0.02  # between two tries to reach the coordinator: at first,
RETRY_MOST = 1.0  # and after a while

# Phases.


class Connecting(NamedTuple):
    """This host tries to reach the coordinator."""

    trouble: str = "DNS has not answered for its name"


class Greeting(NamedTuple):
    """This host has said who it is; it waits for the coordinator's answer."""

    answer_by: float


class Joining(NamedTuple):
    """The coordinator has welcomed this host; other hosts are missing."""


class Running(NamedTuple):
    """All hosts have joined and run."""


class Ended(NamedTuple):
    """This host knows how the job ends."""


Phase = Union[Connecting, Greeting, Joining, Running, Ended]


class State(NamedTuple):
    """All that is known."""

    job: Job
    phase: Phase
    began: float
    line_at: float
    to_say: tuple[Message, ...] = ()  # with each hello, until the coordinator has welcomed it
    hung_up: bool = False  # what took the last connection, at once and without an answer
    attempt: int = 0  # that this host was told to start
    succeeded: int = 0  # the attempt in which all ranks of this host have succeeded
    stop_signal: int = 0  # that this host was sent


Step = tuple[State, tuple[Any, ...]]


def begin(job: Job, now: float) -> Step:
    """Return the state at the launcher's start, and the actions to carry out."""
    return State(job, Connecting(), now, now + LINE_EVERY), (Connect(0),)


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while ranks run."""
    if not isinstance(state.phase, (Connecting, Greeting)):
        return math.inf  # once welcome, only the coordinator's time-outs count
    start_by = state.began + state.job.start_timeout
    answer_by = state.phase.answer_by if isinstance(state.phase, Greeting) else math.inf
    return min(state.line_at, start_by, answer_by)


def step(state: State, event: Any, now: float) -> Step:
    """Return the state after an event, and the actions to carry out."""
    if isinstance(event, Received):
        if event.host == state.job.current_host:
            return this_host_says(state, event.message)
        return coordinator_says(state, event.message)
    if isinstance(event, Lost):
        return coordinator_lost(state, event, now)
    if isinstance(event, Connected):
        return connected(state, now)
    if isinstance(event, Unreachable):
        return unreachable(state, event, now)
    return time_is_up(state, now)


def unreachable(state: State, event: Unreachable, now: float) -> Step:
    """Try again after a while, which grows from 0.02 s to 1 s; not where somebody has hung up."""
    wait = min(RETRY_MOST, max(RETRY, (now - state.began) / 8))
    if not isinstance(state.phase, Connecting):
        return state, ()
    if state.hung_up:
        how = f"was lost: it hung up before it answered, and now {event.trouble}"
        return _end(state, of_lost_host(state.job.coordinator, how).result)
    return state._replace(phase=Connecting(event.trouble)), (Connect(wait),)


def connected(state: State, now: float) -> Step:
    """Say who this host is, and what it has to tell."""
    state = state._replace(phase=Greeting(now + WELCOME_SECONDS))
    return state, tuple(Say(message) for message in (hello(state.job), *state.to_say))


def coordinator_says(state: State, message: Any) -> Step:
    """Follow the coordinator; that the job has succeeded is true only if this host has."""
    if isinstance(message, (NoRanksAnywhere, CollectStacks, AllStacks)):
        return state, (Tell(message),)  # also after the end
    if isinstance(state.phase, Ended):
        return state, ()
    if isinstance(message, Welcome):
        told = any(isinstance(said, Stop) for said in state.to_say)
        state = state._replace(phase=Joining(), to_say=())
        return state, (Tell(AllKnow()),) if told else ()
    if isinstance(message, Later):
        phase = Connecting("it has no room for more connections")
        state = state._replace(phase=phase, hung_up=False)
        return state, (HangUp(state.job.coordinator), Connect(RETRY_MOST))
    if isinstance(message, Refused):
        job = state.job
        text = f"the launcher of {job.coordinator} refused {job.current_host}: {message.why.value}."
        return _end(state, of_host(f"launcher: {text}").result)
    if isinstance(message, Missing):
        return state, (Log(f"waiting for {message.words}."),)
    if isinstance(message, Start):
        state = state._replace(phase=Running(), attempt=message.attempt, succeeded=0)
    elif isinstance(message, End):
        if message.result.exit_code == 0 and not state.succeeded:
            return state, ()
        return _end(state, message.result)
    return state, (Tell(message),)


def coordinator_lost(state: State, event: Lost, now: float) -> Step:
    """End: without the coordinator nobody decides, and torchrun's store is lost with it."""
    job = state.job
    if isinstance(state.phase, Ended):
        return state, ()
    if isinstance(state.phase, Greeting) and event.why in (HUNG_UP, NO_MESSAGE):
        return _no_answer(state, event.why, WELCOME_SECONDS - (state.phase.answer_by - now))
    if state.stop_signal:
        return _end(state, stopped(state.stop_signal))  # which came first
    lost = of_lost_host(job.coordinator, f"was lost: {event.why}")
    state, actions = _end(state, lost.result)
    # If it was only stopped, it says the same when it goes on.
    return state, (Say(Failed(state.attempt, lost)), *actions)


def _no_answer(state: State, why: str, seconds: float) -> Step:
    """End: something else listens there, or the coordinator has ended; one more try tells which."""
    where = f"on port {state.job.peer_port} of {state.job.coordinator}"
    if why == NO_MESSAGE:
        seen = f"what answers {where} is not this job's launcher"
    elif seconds >= AT_ONCE:
        seen = f"what listens {where} has not answered as a launcher in {lasted(seconds)}: "
        seen += "it is not this job's launcher, or that stands still"
    elif state.hung_up:
        seen = f"what listens {where} hangs up without an answer: it is not this job's launcher"
    else:
        phase = Connecting("it hung up before it answered")
        return state._replace(phase=phase, hung_up=True), (Connect(AT_ONCE),)
    return _end(state, no_launcher(seen).result)


def this_host_says(state: State, message: Message) -> Step:
    """Tell the coordinator, which decides; before it knows this host, a stop is decided here."""
    if isinstance(message, Failed):
        message = message._replace(failure=checked(message.failure, state.job.current_host))
    if isinstance(message, Succeeded):
        state = state._replace(succeeded=message.attempt)
    if isinstance(message, Stop):
        state = state._replace(stop_signal=message.number)
    if isinstance(state.phase, Ended):
        return state, (Say(message),)
    if isinstance(state.phase, (Joining, Running)):
        return state, (Say(message),)
    failed_before = any(isinstance(said, Failed) for said in state.to_say)
    state = state._replace(to_say=(*state.to_say, message))
    say = (Say(message),) if isinstance(state.phase, Greeting) else ()
    if isinstance(message, Stop) and not failed_before:
        return state, (*say, Tell(End(stopped(message.number))))
    return state, say


def time_is_up(state: State, now: float) -> Step:
    """Log every 30 s what is missing; end if no answer comes in time."""
    job, phase = state.job, state.phase
    if now < due(state):
        return state, ()
    if isinstance(phase, Greeting) and now >= phase.answer_by:
        return _no_answer(state, "", WELCOME_SECONDS)
    trouble = phase.trouble if isinstance(phase, Connecting) else "it does not answer"
    if now >= state.began + job.start_timeout:
        how = f"did not arrive within {job.start_timeout:g} s ({trouble})"
        return _end(state, of_lost_host(job.coordinator, how).result)
    line = Log(f"waiting for {job.coordinator} ({trouble}).")
    return state._replace(line_at=now + LINE_EVERY), (line,)


def _end(state: State, result: Result) -> Step:
    """Have this host end with a result: there is nobody else whom it has to tell."""
    return state._replace(phase=Ended()), (Tell(End(result)), Tell(AllKnow()))
