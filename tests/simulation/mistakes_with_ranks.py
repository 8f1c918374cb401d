"""Mistakes in what ranks and what they have started hear, and in the time that they have."""

from __future__ import annotations

from typing import Any

from launcher.events import Stop, Time
from launcher.peers import first_state, other_state
from launcher.peers.events import HostStopped
from launcher.run import ending, failing, state
from launcher.run.events import (
    Look,
    RankFailed,
    Remaining,
    Signal,
    SignalGroup,
    SignalTorchrun,
    ThirdInterrupt,
    TorchrunAsks,
    TorchrunEnded,
)
from simulation.planting import Planter, answers, mistake, with_changes, without

RUN, FIRST, OTHER = state.RULES, first_state.RULES, other_state.RULES
P, F, Q = state.Phase, first_state.Phase, other_state.Phase


# Stops


@mistake("(!) a stop while torchrun restarts ranks is lost")
def _(plant: Planter) -> None:
    plant.drop(RUN, Signal, P.RESTARTING, P.CLEARING)


@mistake("(!) a stop is ignored where all ranks of a host have succeeded")
def _(plant: Planter) -> None:
    def ignored(state: Any, event: Any, now: float) -> Any:
        return plain(state, event, now) if state.alive or not state.ranks else (state, ())

    plain = RUN.table[P.RUNNING, Signal].handler
    plant.rule(RUN, P.RUNNING, Signal, ignored)


@mistake("a stop is not told to the other hosts")
def _(plant: Planter) -> None:
    plant.drop(OTHER, Stop, Q.JOINED)


@mistake("(!) a stop hides a failure whose cause is still waited for")
def _(plant: Planter) -> None:
    plant.copy(FIRST, HostStopped, F.FAILING, like=F.JOINED)


@mistake("a stop leaves the failure grace, not its own")
def _(plant: Planter) -> None:
    changes = {"deadline": lambda state, now: now + state.job.failure_grace}
    plant.after(RUN, TorchrunAsks, with_changes(**changes), P.STOPPING)


@mistake("(!) torchrun is not given the launcher's grace")
def _(plant: Planter) -> None:
    plant.after(RUN, TorchrunAsks, answers(1.0), P.STOPPING)


@mistake("torchrun is not told of a stop")
def _(plant: Planter) -> None:
    plant.after(RUN, Signal, without(SignalTorchrun), P.RUNNING)


@mistake("(!) ranks hear SIGTERM again where torchrun is killed after it has told them")
def _(plant: Planter) -> None:
    change = with_changes(told=lambda state, now: frozenset())
    plant.after(RUN, TorchrunEnded, change, *ending._RUNS)


@mistake("what a rank has started that dies unsaved does not hear the stop")
def _(plant: Planter) -> None:
    plant.after(RUN, RankFailed, without(SignalGroup), P.STOPPING)


@mistake("(!) what outlives its rank loses the rest of the grace")
def _(plant: Planter) -> None:
    plant.after(RUN, TorchrunEnded, with_changes(leftovers_by=lambda s, now: now), P.STOPPING)


@mistake("Ctrl-C three times is one stop")
def _(plant: Planter) -> None:
    plant.drop(RUN, ThirdInterrupt, P.STOPPING)


# Time and processes


@mistake("(!) the deadline of the last attempt kills a healthy restart")
def _(plant: Planter) -> None:
    change = with_changes(deadline=lambda state, now: now + state.job.failure_grace)
    plant.after(RUN, Remaining, change, P.CLEARING)
    plant.rule(RUN, P.RUNNING, Time, failing._time_is_up)


@mistake("(!) what ranks leave behind outlives their attempt")
def _(plant: Planter) -> None:
    def at_once(state: Any, event: Any, now: float) -> Any:
        return plain(state, event._replace(processes=()), now)

    plain = RUN.table[P.CLEARING, Remaining].handler
    plant.rule(RUN, P.CLEARING, Remaining, at_once)


@mistake("(!) what ranks leave behind is given up without having been killed")
def _(plant: Planter) -> None:
    change = with_changes(killed_at=lambda state, now: state.leftovers_by)
    plant.after(RUN, TorchrunEnded, change, *ending._RUNS)


@mistake("what ranks leave behind is not looked for")
def _(plant: Planter) -> None:
    plant.after(RUN, TorchrunEnded, without(Look), *ending._RUNS)


@mistake("the ranks of a failed one have no time")
def _(plant: Planter) -> None:
    plant.after(RUN, TorchrunAsks, answers(0.0), P.RUNNING, P.FAILING)


@mistake("a deadline passes, and nothing is done")
def _(plant: Planter) -> None:
    plant.drop(RUN, Time, P.ENDING, P.STOPPING)
