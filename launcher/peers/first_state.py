"""What the first host knows of the job's hosts, and the steps that its rules are made of.

The rules are in first_joining.py and first_deciding.py. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher.errors import EXIT_USAGE
from launcher.events import Decided, Left
from launcher.peers import messages
from launcher.peers.events import TO_LEAVE, Job, SendAll
from launcher.peers.first_missing import Reminder
from launcher.peers.first_pending import PendingConnections
from launcher.result.causes import Cause, Failure, Result
from launcher.rules import PhaseEnum, Rules

_RECENT = 5  # s that a restart may be the cause of a secondary failure
_PATIENCE = f"{Cause.OWN.patience:g} to {Cause.SECONDARY.patience:g} s, by the cause"


class Phase(PhaseEnum):
    """What the hosts of the job are doing, as far as the first one knows."""

    JOINING = (
        "joining",
        "The other hosts connect; what must agree is compared.",
        "start timeout",
    )
    CANCELLING = (
        "cancelling",
        "A host failed, was lost or cannot start before all had joined; a better cause may come.",
        _PATIENCE,
    )
    CANCELLED = (
        "cancelled",
        "The job ends before all have joined; a host that connects now is told so.",
        f"{TO_LEAVE} s",
    )
    JOINED = "joined", "All hosts have joined and run."
    FAILING = "failing", "A host failed or was lost; a better cause may come.", _PATIENCE
    DECIDED = "decided", "All hosts have been told how the job ends."
    LEFT = "left", "This host's launcher is free to end."


P = Phase
OPEN = (P.JOINING, P.CANCELLING, P.CANCELLED)  # hosts may connect
SHUT = (P.JOINED, P.FAILING, P.DECIDED, P.LEFT)


class Seen(NamedTuple):
    """A failure that torchrun mends by a restart, and when it came."""

    failure: Failure
    time: float


class Member(NamedTuple):
    """The connection of a host that has joined."""

    conn: int
    address: str


class State(NamedTuple):
    """All that is known. Times are on the clock time.monotonic(), infinite if nothing is due."""

    job: Job
    phase: Phase
    pending: PendingConnections
    reminder: Reminder
    joined: Mapping[str, Member] = {}
    hosts: Mapping[int, str] = {}  # by connection
    told: frozenset[str] = frozenset()  # hosts that have joined, or know the result
    refused: int = 0  # connections
    succeeded: frozenset[str] = frozenset()
    failure: Failure | None = None  # the best cause that is known
    restarts: tuple[Seen, ...] = ()  # of late, or shortly before the failure
    decide_at: float = math.inf
    result: Result | None = None
    leave_by: float = math.inf


Step = tuple[State, tuple[Any, ...]]
RULES: Rules[State] = Rules()
when = RULES.when


# What several rules do


def note(state: State, failure: Failure, now: float) -> State:
    """Note a failure, and by when a better cause has to come."""
    restarts = state.restarts
    if state.failure is None:
        restarts = tuple(seen for seen in restarts if now - seen.time < _RECENT)
    if failure.cause is Cause.RESTARTED:
        return state._replace(restarts=(*restarts, Seen(failure, now)))
    best = state.failure
    if best is None or failure.cause < best.cause:
        best = failure
    decide_at = min(state.decide_at, now + failure.cause.patience)
    return state._replace(failure=best, restarts=restarts, decide_at=decide_at)


def expect_why(state: State, host: str, now: float) -> State:
    """Wait for what a host that cannot start is about to say: a better cause than this one."""
    text = f"{host} cannot start, and did not say why\n"
    failure = Failure(Cause.SECONDARY, EXIT_USAGE, text)
    return note(state, failure, now)._replace(phase=P.CANCELLING)


def cause(state: State) -> Failure:
    """Return the best cause: a restart shortly before is one of what is secondary."""
    assert state.failure
    known = [seen.failure for seen in state.restarts]
    return min([state.failure, *known], key=lambda failure: failure.cause)


def decide(state: State, result: Result) -> Step:
    """Tell all hosts that have joined how the job ends."""
    phase = P.CANCELLED if state.phase in OPEN else P.DECIDED
    state = state._replace(phase=phase, result=result, decide_at=math.inf)
    return leave_if_told(state, send_all(state, messages.result(result)), Decided(result))


def leave_if_told(state: State, *actions: Any) -> Step:
    """Let this host end, if it is about to, when all hosts know the result."""
    if state.leave_by < math.inf and len(state.told) == len(state.job.others):
        return state._replace(phase=P.LEFT), (*actions, Left())
    return state, actions


def leave_in_time(state: State, now: float) -> Step:
    """Let this host end, if it is about to, when its time to tell the others is over."""
    if now < state.leave_by:
        return state, ()
    return state._replace(phase=P.LEFT), (Left(),)


def send_all(state: State, message: messages.Message) -> SendAll:
    """Send a message to all hosts that have joined."""
    return SendAll(tuple(state.hosts), message)
