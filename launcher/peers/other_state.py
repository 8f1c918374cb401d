"""What another host than the first knows, and the steps that its rules are made of.

The rules are in other_greeting.py and other_following.py. Pure.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from launcher.events import Decided, Left, Stop
from launcher.peers.events import TO_LEAVE, Job
from launcher.result.causes import Failure, Result
from launcher.rules import PhaseEnum, Rules

# Seconds for the first host to welcome this one, or refuse it.
TO_ANSWER = 10
_LEAVES = f"{TO_LEAVE} s for a host that cannot start"


class Phase(PhaseEnum):
    """How far this host has come with the first one."""

    CONNECTING = "connecting", "This host tries to reach the first one.", "start timeout"
    GREETING = (
        "greeting",
        "This host has said hello; it waits for the first one's answer.",
        f"{TO_ANSWER} s, within the start timeout",
    )
    WAITING = "waiting", "The first host has answered; other hosts are missing.", _LEAVES
    JOINED = "joined", "All hosts have joined and run.", _LEAVES
    STOPPED = (
        "stopped",
        "This host was stopped before the first one answered, and still tries to tell it.",
        f"{TO_LEAVE} s",
    )
    DECIDED = "decided", "This host knows how the job ends."
    LEFT = "left", "This host's launcher is free to end."


P = Phase


class State(NamedTuple):
    """All that is known. Times are on the clock time.monotonic(), infinite if nothing is due."""

    job: Job
    phase: Phase
    started: float
    line_at: float
    conn: int | None = None  # to the first host
    own_address: str = ""
    trouble: str = "DNS has not answered for its name"
    answer_by: float = math.inf
    to_tell: tuple[Failure | Stop, ...] = ()  # once this host is welcome
    succeeded: bool = False
    leave_by: float = math.inf

    @property
    def start_by(self) -> float:
        """When the first host has to have welcomed this one."""
        return self.started + self.job.start_timeout


Step = tuple[State, tuple[Any, ...]]
RULES: Rules[State] = Rules()
when = RULES.when


# What several rules do


def decide(state: State, result: Result, *, store_is_lost: bool = False) -> Step:
    """Have this host end with a result."""
    return leave_if_asked(state._replace(phase=P.DECIDED), Decided(result, store_is_lost))


def leave_if_asked(state: State, *actions: Any) -> Step:
    """Let this host end, if it is about to."""
    if state.leave_by < math.inf:
        return state._replace(phase=P.LEFT), (*actions, Left())
    return state, actions


def leave_in_time(state: State, now: float) -> Step:
    """Let this host end, if it is about to, when its time to tell the first one is over."""
    if now < state.leave_by:
        return state, ()
    return state._replace(phase=P.LEFT), (Left(),)
