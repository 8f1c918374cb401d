"""What becomes of this host's torchrun and ranks: an event and the time in, actions out.

The rules are in joining.py, failing.py, stopping.py and ending.py; each says in which phases it
holds, for which event, and to which phases it may lead (docs/how-it-works.md prints them). Nothing
is run here.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from typing import Any

from launcher.events import Decided, Time
from launcher.run import ending, failing, joining, ranks, stopping
from launcher.run.events import (
    ExitCodes,
    RankGone,
    RankIsFinal,
    RankSaid,
    RankStarted,
    Signal,
    ThirdInterrupt,
)
from launcher.run.state import RULES, Actions, Job, State, Step, tell_certain

RULE_FILES = (joining, failing, stopping, ending)  # they register their rules with RULES
_SAID = (RankStarted, RankSaid, RankIsFinal, RankGone, ExitCodes)
_INTERRUPTS, _WITHIN = 3, 2.0  # that many, within so many seconds


def begin(job: Job, now: float = 0.0) -> State:
    """Return the state of a host that has not joined yet."""
    return State(job, {}, began=now)


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while all ranks run."""
    return min(state.deadline, state.certain_by)


def step(state: State, event: Any, now: float) -> Step:
    """Return the state after an event, and the actions to carry out."""
    if isinstance(event, _SAID):
        known, news = ranks.take_in(state.ranks, event, now - state.started)
        if isinstance(event, RankStarted) and math.isinf(state.trains_since):
            state = state._replace(trains_since=now)
        return _steps(state._replace(ranks=known), news, now)
    if isinstance(event, Time):
        state, certain = tell_certain(state, now)
        if now < state.deadline:
            return state, certain
        state, actions = RULES.step(state, event, now)
        return state, certain + actions
    if isinstance(event, Signal) and event.number == signal.SIGINT:
        recent = [at for at in state.interrupts if now - at < _WITHIN]
        state = state._replace(interrupts=(*recent, now))
        if len(state.interrupts) >= _INTERRUPTS:
            event = ThirdInterrupt()
    if isinstance(event, Decided) and state.result is None:
        state = state._replace(result=event.result)
    return RULES.step(state, event, now)


def _steps(state: State, events: Sequence[Any], now: float) -> Step:
    done: Actions = ()
    for event in events:
        state, actions = RULES.step(state, event, now)
        done += actions
    return state, done
