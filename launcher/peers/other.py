"""Every other host's part of the agreement: it joins, tells, and is told how the job ends.

Pure: an event and the time go in, a new state and actions come out.
"""

from __future__ import annotations

import math
from typing import Any

from launcher.events import Tell
from launcher.peers import messages, other_following, other_greeting
from launcher.peers.events import LINE_EVERY, Closed, Connect, Job, Received
from launcher.peers.other_state import RULES, P, State, Step
from launcher.result.causes import Failure

RULE_FILES = (other_greeting, other_following)  # they register their rules with RULES


def begin(job: Job, now: float) -> Step:
    """Return the state at the launcher's start, and the actions to carry out."""
    return State(job, P.CONNECTING, now, now + LINE_EVERY), (Connect(0),)


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while all ranks run."""
    if state.phase is P.LEFT:
        return math.inf
    if state.phase in (P.CONNECTING, P.GREETING):
        return min(state.line_at, state.start_by, state.answer_by, state.leave_by)
    return state.leave_by  # once welcome, only the first host's time-outs count


def step(state: State, event: Any, now: float) -> Step:
    """Return the state after an event, and the actions to carry out."""
    return RULES.step(state, meaning(state, event), now)


def meaning(state: State, event: Any) -> Any:
    """Return what an event says, as the rules have it; None for nothing."""
    if isinstance(event, Tell):
        what = event.what
        return messages.valid(what, state.job.current_host) if isinstance(what, Failure) else what
    if isinstance(event, (Received, Closed)) and event.conn != state.conn:
        return None  # it was closed by what came before it
    if isinstance(event, Received):
        try:
            return messages.first_in(event.message, state.job.hosts, succeeded=state.succeeded)
        except ValueError:
            return None  # messages that are not valid are ignored
    return event
