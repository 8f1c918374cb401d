"""Mistakes that are planted one at a time, for the simulator to find.

(!) marks those that a launcher has once had.
"""

from __future__ import annotations

import math
from typing import Any

from launcher.peers import coordinator, ends, member, messages
from launcher.peers.messages import Failed, Stop
from launcher.result import causes
from launcher.result.causes import RankFailure, Result
from launcher.run import ending, failing, machine, ranks
from launcher.run.events import SignalRanks
from launcher.run.state import Ending, Restarting, Running, Why
from launcher.text import wire
from launcher.watch import stacks
from simulation import mistakes_at_restarts, mistakes_of_starts, mistakes_of_warm_starts
from simulation.planting import MISTAKES, Planter, in_part, mistake, with_options, without

__all__ = ["MISTAKES", "mistakes_at_restarts", "mistakes_of_starts", "mistakes_of_warm_starts"]

# How a job ends.


@mistake("(!) a secondary failure is told as the cause")
def _(plant: Planter) -> None:
    plant.set(RankFailure, "is_secondary", property(lambda failure: False))


@mistake("the coordinator waits 0.1 s for a better cause than a secondary one")
def _(plant: Planter) -> None:
    plant.set(causes, "_PATIENCE", (0.3, 0.5, 1.0, 0.1, 0.1))


@mistake("the worst cause is preferred")
def _(plant: Planter) -> None:
    def worst(plain: Any, state: Any, failure: Any, now: float) -> Any:
        known = getattr(state.phase, "failure", failure)
        after = plain(state, failure, now)
        chosen = max(known, failure, key=lambda one: one.cause)
        return after._replace(phase=after.phase._replace(failure=chosen))

    plant.around(coordinator, "_note", worst)


@mistake("the last failure of its kind is told, not the first")
def _(plant: Planter) -> None:
    def last(plain: Any, state: Any, failure: Any, now: float) -> Any:
        after = plain(state, failure, now)
        if after.phase.failure.cause is failure.cause:
            return after._replace(phase=after.phase._replace(failure=failure))
        return after

    plant.around(coordinator, "_note", last)


@mistake("(!) of two failures of one host the later counts as the first")
def _(plant: Planter) -> None:
    def reverse(plain: Any, known: Any, time: float, patience: float) -> Any:
        found = [plain({pid: rank}, time, patience) for pid, rank in known.items()]
        counting = [rank for of_one, _ in found for rank in of_one]
        counting.sort(key=lambda rank: -rank.failure.time)
        return counting, min((wait for _, wait in found), default=math.inf)

    plant.around(ranks, "to_count", reverse)


@mistake("a rank that has left is not told of")
def _(plant: Planter) -> None:
    plant.set(failing, "report_ends", lambda *_, **__: ())
    plant.set(machine, "report_ends", lambda *_, **__: ())


@mistake("a rank had ended before the failure that ended after it")
def _(plant: Planter) -> None:
    plant.around(ends, "named", lambda plain, known, at: plain(known, at + 60))


@mistake("a failure is not told to the coordinator")
def _(plant: Planter) -> None:
    def silent(plain: Any, state: Any, message: Any) -> Any:
        is_told = isinstance(message, Failed) and isinstance(state.phase, member.Joined)
        return (state, ()) if is_told else plain(state, message)

    plant.around(member, "reported", silent)


@mistake("(!) a failure counts before its exit code is certain")
def _(plant: Planter) -> None:
    plant.set(failing, "CONFIRM_FAILURE_SECONDS", 0.0)


@mistake("a rank whose hook ends it with 0 has failed")
def _(plant: Planter) -> None:
    def fails(plain: Any, known: Any, time: float, patience: float) -> Any:
        changed = {
            pid: rank._replace(exit_code=1) if rank.failure and rank.exit_code == 0 else rank
            for pid, rank in known.items()
        }
        return plain(changed, time, patience)

    plant.around(ranks, "to_count", fails)


@mistake("members do not hear what is decided")
def _(plant: Planter) -> None:
    def alone(plain: Any, state: Any, message: Any) -> Any:
        state, actions = plain(state, message)
        is_end = isinstance(message, messages.End)
        return state, actions[-1:] if is_end else actions

    plant.around(coordinator, "_command_all", alone)


@mistake("a host that is lost is nobody's loss")
def _(plant: Planter) -> None:
    plant.nothing(coordinator, "host_lost")


@mistake("a host goes on without the coordinator")
def _(plant: Planter) -> None:
    plant.nothing(member, "coordinator_lost")


@mistake("(!) that torchrun was killed is told only when the program ends that runs it")
def _(plant: Planter) -> None:
    def silent(plain: Any, state: Any, event: Any, now: float) -> Any:
        if not state.program.name:
            return plain(state, event, now)
        return state._replace(
            torchrun=state.torchrun._replace(requests_close=False, ended_at=now)
        ), ()

    plant.around(machine, "torchrun_ended", silent)


@mistake("a host succeeds though the program has failed that runs its torchrun")
def _(plant: Planter) -> None:
    def succeeds(plain: Any, state: Any, event: Any, now: float) -> Any:
        return plain(state, event._replace(returncode=0), now)

    plant.around(machine, "child_ended", succeeds)


@mistake("somebody's SIGTERM to torchrun is not noticed")
def _(plant: Planter) -> None:
    def deaf(plain: Any, state: Any, event: Any, now: float) -> Any:
        return (state, ()) if event.number else plain(state, event, now)

    plant.around(machine, "close_requested", deaf)


@mistake("the job succeeds with the first host that does")
def _(plant: Planter) -> None:
    done = Result(0)
    plant.set(coordinator, "host_succeeded", lambda state, *_: coordinator._end_job(state, done))


@mistake("torchrun's success is not held against its ranks'")
def _(plant: Planter) -> None:
    plant.set(machine.State, "has_succeeded", property(lambda state: not state.alive))


# How it starts.


@mistake("torchrun starts with one host missing")
def _(plant: Planter) -> None:
    def early(plain: Any, state: Any, event: Any, now: float) -> Any:
        hosts = state.job.cluster.hosts
        cluster = state.job.cluster._replace(hosts=hosts[:-1] if len(hosts) > 2 else hosts)
        fewer = state.job._replace(cluster=cluster)
        after, actions = plain(state._replace(job=fewer), event, now)
        return after._replace(job=state.job), actions

    plant.around(coordinator, "host_arrived", early)


@mistake("hosts that differ start together")
def _(plant: Planter) -> None:
    plant.set(coordinator, "_difference", lambda state, theirs: "")


@mistake("(!) a host that is to come later takes it for a refusal")
def _(plant: Planter) -> None:
    refusal = messages.Refused(messages.Refusal.NO_HOST)
    plant.set(member, "later", lambda state, message: member.refused(state, refusal))


@mistake("(!) the coordinator looks who is missing though all are here")
def _(plant: Planter) -> None:
    def often(plain: Any, state: Any) -> float:
        return min(plain(state), state.attempt_began + 5 if state.attempt else math.inf)

    plant.around(coordinator, "due", often)


@mistake("(!) whoever knows the job's hosts can end it with 0")
def _(plant: Planter) -> None:
    plant.set(wire.Among, "__call__", lambda bound, value: value)
    plant.set(coordinator, "checked", lambda failure, host: failure)


@mistake("who cannot start does not wait for those who come late")
def _(plant: Planter) -> None:
    plant.set(machine, "DEPART_SECONDS", 0.0)


# Restarts.


@mistake("a failure that a restart would mend ends the job")
def _(plant: Planter) -> None:
    plant.set(coordinator, "_may_restart", lambda state, failing: False)


@mistake("restarts are never used up")
def _(plant: Planter) -> None:
    plant.set(coordinator, "_may_restart", lambda state, failing: failing.may_restart)


@mistake("the next attempt starts when one host has cleared this one")
def _(plant: Planter) -> None:
    def early(plain: Any, state: Any, host: str, event: Any, now: float) -> Any:
        all_hosts = frozenset((*state.job.cluster.hosts,)) - {host}
        if isinstance(state.phase, coordinator.JobRestarting) and event.attempt == state.attempt:
            state = state._replace(phase=state.phase._replace(cleared=all_hosts))
        return plain(state, host, event, now)

    plant.around(coordinator, "host_cleared", early)


@mistake("(!) a stop while ranks are restarted is lost")
def _(plant: Planter) -> None:
    def lost(plain: Any, state: Any, event: Any, now: float) -> Any:
        phase = state.phase
        ends = isinstance(phase, Ending) and phase.why is Why.RESTART
        return (state, ()) if ends or isinstance(phase, Restarting) else plain(state, event, now)

    plant.around(machine, "signalled", lost)


@mistake("the coordinator forgets a stop while hosts clear an attempt")
def _(plant: Planter) -> None:
    def forgets(plain: Any, state: Any, *event: Any) -> Any:
        restarts = isinstance(state.phase, coordinator.JobRestarting)
        return (state, ()) if restarts else plain(state, *event)

    plant.around(coordinator, "host_stopped", forgets)


@mistake("a host that is lost while ranks are restarted is waited for")
def _(plant: Planter) -> None:
    def waits(plain: Any, state: Any, event: Any, now: float) -> Any:
        restarts = isinstance(state.phase, coordinator.JobRestarting)
        return (state, ()) if restarts else plain(state, event, now)

    plant.around(coordinator, "host_lost", waits)


@mistake("(!) what ranks leave behind outlives their attempt")
def _(plant: Planter) -> None:
    def forgets(plain: Any, state: Any, event: Any, now: float) -> Any:
        phase = state.phase
        restarts = isinstance(phase, Ending) and phase.why is Why.RESTART
        return plain(state, event._replace(pids=()) if restarts else event, now)

    plant.around(machine, "leftovers_found", forgets)


@mistake("what happened in the last attempt is taken for this one's")
def _(plant: Planter) -> None:
    def keeps(plain: Any, state: Any, event: Any, now: float) -> Any:
        after, actions = plain(state, event, now)
        return after._replace(ranks=state.ranks, torchrun=state.torchrun), actions

    plant.around(machine, "started", keeps)


@mistake("ranks are restarted though one has said that its GPU broke")
def _(plant: Planter) -> None:
    plant.set(causes, "broken_hardware", lambda *_: "")
    plant.set(ending, "broken_hardware", lambda *_: "")


@mistake("what a rank says of its GPU while ranks are ended is lost")
def _(plant: Planter) -> None:
    plant.set(ending, "broken_hardware", lambda *_: "")


@mistake("ranks are restarted whatever the driver of the GPUs says")
def _(plant: Planter) -> None:
    def deaf(plain: Any, state: Any, event: Any, now: float) -> Any:
        return plain(state, event._replace(broken=""), now)

    plant.around(machine, "gpus_checked", deaf)


@mistake("a driver that hangs is waited for")
def _(plant: Planter) -> None:
    plant.set(ending, "GPU_CHECK_SECONDS", 1e6)


# Stops.


@mistake("a stop is not told to the other hosts")
def _(plant: Planter) -> None:
    def silent(plain: Any, state: Any, event: Any, now: float) -> Any:
        after, actions = plain(state, event, now)
        return after, without(Stop, actions) if isinstance(state.phase, Running) else actions

    plant.around(machine, "signalled", silent)


@mistake("(!) a stop hides a failure whose cause is still waited for")
def _(plant: Planter) -> None:
    def hides(plain: Any, state: Any, host: str, message: Any, now: float) -> Any:
        if isinstance(state.phase, coordinator.JobFailing):
            return coordinator._end_job(state, causes.stopped(message.number))
        return plain(state, host, message, now)

    plant.around(coordinator, "host_stopped", hides)


@mistake("(!) a stop leaves the failure grace, not its own")
def _(plant: Planter) -> None:
    def short(plain: Any, state: Any, number: int, now: float) -> Any:
        job = with_options(state.job, grace=state.job.options.failure_grace)
        after, actions = plain(state._replace(job=job), number, now)
        return after._replace(job=state.job), actions

    plant.around(machine, "_stop", short)


@mistake("ranks are not told of a stop")
def _(plant: Planter) -> None:
    def silent(plain: Any, state: Any, given: Any, now: float) -> Any:
        after, actions = plain(state, given, now)
        return after, without(SignalRanks, actions)

    plant.around(ending, "advance", silent)
    plant.set(machine, "advance", ending.advance)


@mistake("(!) ranks hear SIGTERM again")
def _(plant: Planter) -> None:
    def again(plain: Any, state: Any, given: Any, now: float) -> Any:
        return plain(state, given._replace(signalled=frozenset()), now)

    plant.around(ending, "advance", again)
    plant.set(machine, "advance", ending.advance)


@mistake("what a rank has started that dies unsaved does not hear the stop")
def _(plant: Planter) -> None:
    plant.set(machine, "ended_while_ending", lambda *_: ())


@mistake("(!) what outlives its rank loses the rest of the grace")
def _(plant: Planter) -> None:
    plant.set(ending, "_leftovers_end_at", lambda *_: ending.NOW)


@mistake("Ctrl-C three times is one stop")
def _(plant: Planter) -> None:
    plant.set(machine, "INTERRUPTS_TO_KILL", 99)


# Time and processes.


@mistake("(!) the store goes before ranks that save")
def _(plant: Planter) -> None:
    def goes(plain: Any, state: Any, given: Any) -> Any:
        torchrun = state.torchrun._replace(keeps_store=False)
        return plain(state._replace(torchrun=torchrun), given)

    in_part(plant, "_end_torchrun", goes)


@mistake("(!) a torchrun that does not ask is waited for")
def _(plant: Planter) -> None:
    plant.set(ending, "CLOSE_REQUEST_SECONDS", math.inf)


@mistake("torchrun is not answered")
def _(plant: Planter) -> None:
    def silent(plain: Any, state: Any, given: Any) -> Any:
        return None if given.why is Why.SUCCESS else plain(state, given)

    plant.around(ending, "_end_torchrun", silent)


@mistake("(!) what ranks leave behind is given up without having been killed")
def _(plant: Planter) -> None:
    def gives_up(plain: Any, state: Any, given: Any) -> Any:
        if math.isinf(given.kill.began):
            given = given._replace(kill=given.kill._replace(began=given.since))
        return plain(state, given)

    plant.around(ending, "_conclude", gives_up)


@mistake("what ranks leave behind is not looked for")
def _(plant: Planter) -> None:
    def blind(plain: Any, state: Any, event: Any, now: float) -> Any:
        return plain(state, event._replace(pids=()), now)

    plant.around(machine, "leftovers_found", blind)


@mistake("the ranks of a failed one have no time")
def _(plant: Planter) -> None:
    def none(plain: Any, state: Any, why: Any, now: float) -> Any:
        job = with_options(state.job, failure_grace=0)
        after, actions = plain(state._replace(job=job), why, now)
        return after._replace(job=state.job), actions

    plant.around(machine, "_end", none)


@mistake("a deadline passes, and nothing is done")
def _(plant: Planter) -> None:
    def passes(plain: Any, state: Any, now: float) -> Any:
        return (state, ()) if isinstance(state.phase, Ending) else plain(state, now)

    plant.around(machine, "time_is_up", passes)


# Where ranks are.


@mistake("stacks wait for a host that is lost")
def _(plant: Planter) -> None:
    plant.set(stacks, "GATHER_SECONDS", 60.0)
