"""Mistakes in how a job starts and ends; mistakes_with_ranks.py has others.

They are planted into the state machines, one at a time, for the simulator to find. Each replaces
rules, functions or constants. (!) marks those that the launcher has once had.
"""

from __future__ import annotations

import math
from typing import Any

from launcher.events import Tell, Time
from launcher.peers import (
    first,
    first_deciding,
    first_joining,
    first_state,
    messages,
    other_greeting,
    other_state,
)
from launcher.peers.events import (
    Closed,
    HelloFrom,
    HostLost,
    HostSucceeded,
)
from launcher.peers.messages import Ends, Later
from launcher.result import causes
from launcher.result.causes import Cause, Failure, RankFailure
from launcher.run import failing, state, stopping
from launcher.run.events import (
    RankFailed,
    TorchrunGone,
)
from simulation import runner
from simulation.planting import Planter, mistake, without

RUN, FIRST, OTHER = state.RULES, first_state.RULES, other_state.RULES
P, F, Q = state.Phase, first_state.Phase, other_state.Phase

# How a job ends


@mistake("(!) a rank that dies of a restart is taken for the cause")
def _(plant: Planter) -> None:
    plant.copy(RUN, RankFailed, P.RESTARTING, like=P.RUNNING)


@mistake("(!) what a rank does while torchrun ends it is taken for the cause")
def _(plant: Planter) -> None:
    def taken(state: Any, event: Any, now: float) -> Any:
        return plain(state._replace(closing=None), event, now)

    plain = RUN.table[P.RUNNING, RankFailed].handler
    plant.rule(RUN, P.ENDING, RankFailed, taken)


@mistake("(!) a secondary failure is told as the cause")
def _(plant: Planter) -> None:
    plant.set(RankFailure, "is_secondary", property(lambda failure: False))


@mistake("(!) a torchrun that is held is not released")
def _(plant: Planter) -> None:
    plant.drop(RUN, Time, P.HOLDING)


@mistake("torchrun is not held for a better cause")
def _(plant: Planter) -> None:
    plant.set(failing, "_wants_better_cause", lambda state: False)


@mistake("the first host waits 0.1 s for a better cause than a secondary one")
def _(plant: Planter) -> None:
    plant.set(causes, "_PATIENCE", (0.3, 0.5, 1.0, math.inf, 0.1, 0.1))


@mistake("the worst cause is preferred")
def _(plant: Planter) -> None:
    def worst(state: Any) -> Failure:
        known = [state.failure, *(seen.failure for seen in state.restarts)]
        return max(known, key=lambda failure: failure.cause)

    plant.set(first_deciding, "cause", worst)


@mistake("the last failure of its own is told, not the first")
def _(plant: Planter) -> None:
    def last(state: Any, failure: Failure, now: float) -> Any:
        state = note(state, failure, now)
        same = state.failure and state.failure.cause is failure.cause
        return state._replace(failure=failure) if same else state

    note = first_deciding.note
    plant.set(first_deciding, "note", last)


@mistake("(!) a restart counts for 5 s to the decision, not to the failure")
def _(plant: Planter) -> None:
    def late(state: Any) -> Failure:
        known = [s.failure for s in state.restarts if state.decide_at - s.time < 5]
        return min([state.failure, *known], key=lambda failure: failure.cause)

    plant.set(first_deciding, "cause", late)


@mistake("a failure that torchrun restarts ends the job")
def _(plant: Planter) -> None:
    def ends(state: Any, failure: Failure, now: float) -> Any:
        return note(state, failure._replace(cause=Cause.OWN), now)

    note = first_deciding.note
    plant.set(first_deciding, "note", ends)


@mistake("a failure is not told to the first host")
def _(plant: Planter) -> None:
    plant.drop(OTHER, Failure, Q.JOINED)


@mistake("(!) a failure is told before its exit code is certain")
def _(plant: Planter) -> None:
    plant.set(failing, "TO_BE_CERTAIN", 0.0)


@mistake("a rank whose hook ends it with 0 has failed")
def _(plant: Planter) -> None:
    plant.set(failing, "_withdraw", lambda state, pid: state)


@mistake("the other hosts do not hear what is decided")
def _(plant: Planter) -> None:
    plant.drop(OTHER, Ends, Q.JOINED)


@mistake("a host that is lost is nobody's loss")
def _(plant: Planter) -> None:
    plant.drop(FIRST, HostLost, F.JOINED)


@mistake("a host goes on without the first one")
def _(plant: Planter) -> None:
    plant.drop(OTHER, Closed, Q.JOINED)


@mistake("(!) that torchrun was killed is told only when the program ends that runs it")
def _(plant: Planter) -> None:
    plant.after(RUN, TorchrunGone, without(Tell), P.RUNNING)


@mistake("a host succeeds though the program has failed that runs its torchrun")
def _(plant: Planter) -> None:
    def loses(ended: Any, gone: Any, program: str) -> Any:
        return plain(ended._replace(returncode=0), gone, program)

    plain = runner.of_both
    plant.set(runner, "of_both", loses)


@mistake("a torchrun that does not hear SIGTERM is waited for")
def _(plant: Planter) -> None:
    for file in (failing, stopping):
        plant.set(file, "to_pass_on", lambda grace: grace + state.MARGIN)


@mistake("the job succeeds with the first host that does")
def _(plant: Planter) -> None:
    def all_of_them(state: Any, actions: Any, now: float) -> Any:
        return first_state.decide(state, causes.Result(0))

    plant.after(FIRST, HostSucceeded, all_of_them, F.JOINED)


# How it starts


@mistake("torchrun starts with one host missing")
def _(plant: Planter) -> None:
    def early(state: Any, event: Any, now: float) -> Any:
        others = (
            state.job.others - {max(state.job.others - state.joined.keys() - {event.host})}
            if len(state.job.others - state.joined.keys()) > 1
            else state.job.others
        )
        after, actions = join(state._replace(job=state.job._replace(others=others)), event, now)
        return after._replace(job=state.job), actions

    rule = FIRST.table[F.JOINING, HelloFrom]
    join = rule.handler
    plant.rule(FIRST, F.JOINING, HelloFrom, early)


@mistake("hosts that differ start together")
def _(plant: Planter) -> None:
    plant.set(first_joining, "_difference", lambda state, hello: "")


@mistake("(!) a host that is to come later takes it for a refusal")
def _(plant: Planter) -> None:
    plant.rule(OTHER, Q.GREETING, Later, lambda state, event, now: other_greeting._fail(state))


@mistake("(!) the first host looks who is missing though all are here")
def _(plant: Planter) -> None:
    def due(state: Any) -> float:
        return math.inf if state.phase is F.LEFT else min(plain(state), state.reminder.due)

    plain = first.due
    plant.set(first, "due", due)


@mistake("(!) whoever knows the job's hosts can end it with 0")
def _(plant: Planter) -> None:
    plant.set(messages, "range", lambda *_: frozenset(range(256)))
    plant.set(messages, "valid", lambda failure, host: failure)


@mistake("who cannot start does not wait for those who come late")
def _(plant: Planter) -> None:
    plant.set(first_deciding, "TO_LEAVE", 0.0)
