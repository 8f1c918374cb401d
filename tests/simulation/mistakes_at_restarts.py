"""Mistakes around restarts: what survives SIGKILL, who waits, stops meanwhile; and the store."""

from __future__ import annotations

from typing import Any

from launcher.peers import channel, coordinator
from launcher.peers.messages import Cleared, NoRanksAnywhere, Stop
from launcher.result.causes import Result, stopped
from launcher.run import ending, machine
from launcher.run.events import Report
from launcher.run.state import Done, Ending, Restarting, Waiting, Why
from simulation.planting import Planter, in_part, mistake, with_options, without

# What survives SIGKILL.


@mistake("ranks are restarted though a process has survived SIGKILL")
def _(plant: Planter) -> None:
    def restarts(plain: Any, state: Any, host: str, event: Any, now: float) -> Any:
        return plain(state, host, event._replace(survivors=0), now)

    plant.around(coordinator, "host_cleared", restarts)


@mistake("what survives SIGKILL on another host is not heard of")
def _(plant: Planter) -> None:
    def loses(plain: Any, message: Any) -> Any:
        said = plain(message)
        return said._replace(survivors=0) if isinstance(said, Cleared) else said

    plant.around(channel, "from_member", loses)


@mistake("only what survives SIGKILL on the host that is the last counts")
def _(plant: Planter) -> None:
    def of_last(plain: Any, state: Any, host: str, event: Any, now: float) -> Any:
        known = getattr(state.phase, "cleared", frozenset())
        is_last = len(known | {host}) > len(state.job.members)
        return plain(state, host, event if is_last else event._replace(survivors=0), now)

    plant.around(coordinator, "host_cleared", of_last)


def counts(plant: Planter, of: Any) -> None:
    """Have a host count what has survived in another way."""

    def count(plain: Any, state: Any, given: Any, survivors: int, now: float) -> Any:
        return plain(state, given, of(state, given, survivors), now)

    plant.around(ending, "_nothing_remains", count)


@mistake("a host does not count what has survived SIGKILL")
def _(plant: Planter) -> None:
    counts(plant, lambda state, given, survivors: 0)


@mistake("of what survives SIGKILL only ranks count")
def _(plant: Planter) -> None:
    counts(plant, lambda state, given, survivors: len(state.alive))


@mistake("of what survives SIGKILL only what ranks have left counts")
def _(plant: Planter) -> None:
    counts(plant, lambda state, given, survivors: len(given.leftovers.pids or ()))


@mistake("a torchrun that survives SIGKILL does not count")
def _(plant: Planter) -> None:
    counts(plant, lambda state, _, many: many - (not state.torchrun.child_has_ended))


@mistake("what is killed has no time to end")
def _(plant: Planter) -> None:
    plant.set(ending, "MARGIN_SECONDS", 0.5)


# Hosts that wait.


def in_waiting(plant: Planter, act: Any) -> None:
    """Have a host that waits do something else when ranks are restarted."""

    def instead(plain: Any, state: Any, event: Any, now: float) -> Any:
        after, actions = plain(state, event, now)
        return act(state, after, actions) if isinstance(state.phase, Waiting) else (after, actions)

    plant.around(machine, "restarted", instead)


@mistake("a host that waits does not say that it has cleared the attempt")
def _(plant: Planter) -> None:
    in_waiting(plant, lambda state, after, actions: (state._replace(phase=Restarting()), ()))


@mistake("a host that waits takes no part in a restart")
def _(plant: Planter) -> None:
    in_waiting(plant, lambda state, after, actions: (state, ()))


@mistake("a host that waits says that it has cleared the attempt, and waits on")
def _(plant: Planter) -> None:
    in_waiting(plant, lambda state, after, actions: (state, actions))


@mistake("a host that waits ends at a restart")
def _(plant: Planter) -> None:
    def ends(state: Any, after: Any, actions: Any) -> Any:
        return after._replace(phase=Done(), result=Result(0)), actions

    in_waiting(plant, ends)


# Stops while ranks are restarted.


def is_restarting(phase: Any) -> bool:
    """Report whether a host waits for the others, or ends its ranks for a restart."""
    return isinstance(phase, Restarting) or getattr(phase, "why", None) is Why.RESTART


def at_stop(plant: Planter, kind: type, act: Any) -> None:
    """Have a host do something else at a stop in one part of a restart."""

    def instead(plain: Any, state: Any, event: Any, now: float) -> Any:
        after, actions = plain(state, event, now)
        here = isinstance(state.phase, kind) and is_restarting(state.phase)
        return act(state, after, actions, event.number) if here else (after, actions)

    plant.around(machine, "signalled", instead)


@mistake("a stop is not passed on by a host that waits for the others' restart")
def _(plant: Planter) -> None:
    at_stop(plant, Restarting, lambda state, after, actions, number: (state, ()))


@mistake("a stop of a host that waits for the others' restart ends that host alone")
def _(plant: Planter) -> None:
    def ends(state: Any, after: Any, actions: Any, number: int) -> Any:
        return after._replace(phase=Done(), result=stopped(number)), ()

    at_stop(plant, Restarting, ends)


@mistake("a stop is not passed on by a host that ends its ranks for a restart")
def _(plant: Planter) -> None:
    def silent(state: Any, after: Any, actions: Any, number: int) -> Any:
        return after, without(Stop, actions)

    at_stop(plant, Ending, silent)


@mistake("a stop does not stop ranks that are ended for a restart")
def _(plant: Planter) -> None:
    def only_tells(state: Any, after: Any, actions: Any, number: int) -> Any:
        return state, (Report(Stop(number)),)

    at_stop(plant, Ending, only_tells)


@mistake("a stop of another host is forgotten while hosts clear an attempt")
def _(plant: Planter) -> None:
    def forgets(plain: Any, state: Any, event: Any, now: float) -> Any:
        said = isinstance(event, coordinator.Received) and isinstance(event.message, Stop)
        restarts = isinstance(state.phase, coordinator.JobRestarting)
        if said and restarts and event.host != state.job.current_host:
            return state, ()
        return plain(state, event, now)

    plant.around(coordinator, "step", forgets)


@mistake("a stop while hosts clear an attempt ends the job with the failure")
def _(plant: Planter) -> None:
    def fails(plain: Any, state: Any, *message: Any) -> Any:
        if isinstance(state.phase, coordinator.JobRestarting):
            return coordinator._end_job(state, state.phase.failure.result)
        return plain(state, *message)

    plant.around(coordinator, "host_stopped", fails)


# The store.


def thinks(plant: Planter, hosts: Any) -> None:
    """Have the coordinator take ranks of some hosts for ended."""

    def tells(plain: Any, state: Any) -> Any:
        after, actions = plain(state._replace(no_ranks=state.no_ranks | hosts(state)))
        return after._replace(no_ranks=state.no_ranks), actions

    plant.around(coordinator, "_if_no_ranks", tells)


@mistake("the store goes when the first host has no ranks")
def _(plant: Planter) -> None:
    thinks(plant, lambda state: {state.job.current_host, *state.members})


@mistake("the store goes when the hosts but the first have no ranks")
def _(plant: Planter) -> None:
    thinks(plant, lambda state: {state.job.current_host})


@mistake("the store goes when the first of the hosts has no ranks, whatever the others have")
def _(plant: Planter) -> None:
    thinks(plant, lambda state: {*state.members})


@mistake("the store goes when all hosts but one have no ranks")
def _(plant: Planter) -> None:
    thinks(plant, lambda state: set(sorted({*state.job.cluster.hosts} - state.no_ranks)[:1]))


@mistake("the store goes when a host has ended, whatever the others have")
def _(plant: Planter) -> None:
    def goes(plain: Any, state: Any, event: Any, now: float) -> Any:
        after, actions = plain(state, event, now)
        if isinstance(state.phase, coordinator.JobEnded):
            return coordinator._command_all(after, NoRanksAnywhere(state.attempt))
        return after, actions

    plant.around(coordinator, "host_lost", goes)


@mistake("the store goes when its own host has no ranks")
def _(plant: Planter) -> None:
    plant.around(
        ending,
        "_end_torchrun",
        lambda plain, state, given: plain(state._replace(no_ranks_anywhere=not state.alive), given),
    )


@mistake("the store is kept no longer than for the ranks of its own host")
def _(plant: Planter) -> None:
    def goes(plain: Any, state: Any, given: Any) -> Any:
        part = plain(state, given)
        sooner = plain(state._replace(no_ranks_anywhere=True), given)
        if part is None or sooner is None:
            return part
        at = max(sooner.at, given.since + min(1.0, state.job.options.failure_grace))
        return part._replace(at=min(part.at, at))

    plant.around(ending, "_end_torchrun", goes)


@mistake("a host says that it has no ranks when it begins to end them")
def _(plant: Planter) -> None:
    plant.around(
        ending,
        "_report_no_ranks",
        lambda plain, state, given: (part := plain(state, given)) and part._replace(at=ending.NOW),
    )


@mistake("the store does not wait for ranks that save longer than after a failure")
def _(plant: Planter) -> None:
    def short(plain: Any, state: Any, given: Any) -> Any:
        job = with_options(state.job, grace=0)
        return plain(state._replace(job=job), given._replace(deadline=given.since))

    in_part(plant, "_end_torchrun", short)
