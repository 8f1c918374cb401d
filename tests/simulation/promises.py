"""What is promised of how a job starts and ends; promises_of_ranks.py has what ranks are promised.

Where a promise cannot hold, since what tells the hosts is broken as well, it says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from launcher.peers.channel import MOST_RETRY_SECONDS
from launcher.result.causes import NO_RESTART, Cause, Result
from launcher.run.machine import GONE_SECONDS
from simulation import faults, promises_of_ranks
from simulation.facts import broken, ended, has, launchers, lost, planned, promise, seconds_of
from simulation.faults import FAILURES, HELD, LOSSES, PAUSES, SLOW, STOPS, TORCHRUNS, What
from simulation.keeper import AGAIN, STUCK
from simulation.launcher import Launcher
from simulation.machine import Process
from simulation.network import GIVES_UP
from simulation.plan import AtBreak, Plan
from simulation.truth import is_true, line_of_failure, said_at
from simulation.watch import Watch

SILENCE = 60.0  # s, until a launcher is lost that says nothing

__all__ = ["broken", "promises_of_ranks"]


@promise("torchrun is started when all hosts have joined")
def starts_together(watch: Watch) -> Iterator[str]:
    """And agree."""
    absent = [machine.name for machine in watch.job.machines if machine.launcher is None]
    differ = planned(watch, What.DIFFERS, What.CANNOT_START) and watch.job.plan.hosts > 1
    for at, machine, _ in watch.started:
        if absent or differ:
            yield f"{machine.name} starts torchrun at {at:.3f} s; absent: {absent}"


@promise(
    "A host that is late, slow, or stands still for a moment ends no job",
    unless=tuple(what for what in faults.MISCONFIGURED if what is not What.PORT_TAKEN),
)
def goes_well(watch: Watch) -> Iterator[str]:
    """Nor does a port that is taken for a moment."""
    most = {What.PORT_TAKEN: 2.0, What.HOST_LATE: 20.0, What.DELAY: 2.0}
    # A host that stands still is slow, until it is silent or not here at the start timeout.
    most[What.LAUNCHER_PAUSES] = 20.0 if watch.job.plan.start_timeout >= 60 else 2.0
    harmless = (What.HOST_SLOW, What.STARTS_SLOWLY, *most)
    long = any(one.amount > most.get(one.what, math.inf) for one in watch.job.plan.faults)
    if not long and all(one.fault.what in harmless for one in watch.faults):
        for launcher in launchers(watch):
            if launcher.result != Result(0):
                yield f"{launcher.machine.name} ends with {launcher.result}"


@promise("every rank of every host has succeeded")
def success_is_true(watch: Watch) -> Iterator[str]:
    """If any host exits with 0."""
    plan, last = watch.job.plan, watch.attempt
    for launcher, result in ended(watch):
        if result.exit_code != 0:
            continue
        for machine in watch.job.machines:
            of_it = [one for one in watch.ranks if one.machine is machine and one.attempt == last]
            if len(of_it) < plan.nproc or any(rank.exit_code != 0 for rank in of_it):
                yield f"{launcher.machine.name} ends with 0, but not all ranks of {machine.name}"
        runner = launcher.machine.runner
        if runner and runner.exit_code != 0:
            yield f"{launcher.machine.name} ends with 0, but not its runner"


@promise(
    "every host writes the same text and exits with the same code",
    unless=(What.PORT_TAKEN,),
)
def all_say_the_same(watch: Watch) -> Iterator[str]:
    """All hosts but those that are lost, or have not joined."""
    # Nobody tells a launcher that has failed itself.
    away, first = lost(watch), watch.job.machines[0]
    own = (*TORCHRUNS, What.RUNNER_FAILS, What.LAUNCHER_FAILS, *LOSSES, *STOPS)
    if watch.job.plan.runner is not None and has(watch, *own):
        return  # after a success each host's program is that host's own
    if not first.launcher or first in away:
        return
    away |= {one.machine for one in has(watch, What.LAUNCHER_FAILS)}
    said = {watch.decided[1]: "the coordinator"} if watch.decided else {}
    for launcher, result in ended(watch):
        if launcher.machine not in away and not _is_alone(watch, launcher, first.launcher):
            said.setdefault(result, launcher.machine.name)
    if len(said) > 1:
        yield "; ".join(f"{name}: {result}" for result, name in said.items())


def _is_alone(watch: Watch, launcher: Launcher, first: Launcher) -> bool:
    """Tell whether a host came too late to hear the result, or left before it met the first."""
    stays = (watch.decided[0] if watch.decided else math.inf) + 2.5
    leaves_first = launcher.ended_at <= first.started_at + MOST_RETRY_SECONDS
    is_odd = bool(launcher.stops) or planned(watch, *SLOW, What.LAUNCHER_FAILS)
    return launcher.started_at > stays or leaves_first or (launcher.torchrun is None and is_odd)


@promise("Before the coordinator decides, it waits for a better cause than the one it knows")
def best_failure(watch: Watch) -> Iterator[str]:
    """Of those that it has heard of by then it takes the first of the best kind.

    After a stop that came too late to count, the end of a torchrun is no cause.
    """
    if watch.decided is None or not watch.failures:
        return
    result, last = watch.decided[1], max(one.attempt for one in watch.failures)
    at = watch.settled_at
    # A host may report in time for the next attempt what no attempt would survive.
    counting = [one for one in watch.failures if one.attempt == last or not one.failure.may_restart]
    known = [one.failure for one in counting if one.time <= at]
    if not known or result.exit_code == 0 or result.stop_signal:
        return
    expected = min(known, key=lambda failure: failure.cause).headline
    others = [failure for failure in known if failure.cause is not Cause.TORCHRUN_ENDS]
    if any(one.stopping_since < math.inf for one in launchers(watch)) and others:
        expected = min(others, key=lambda failure: failure.cause).headline
    first = line_of_failure(result)
    says_else = "differ" in result.text or "arrive" in result.text
    if not first.startswith((expected, "ranks have made no progress for")) and not says_else:
        while_restarted = (" was lost: ", "the launcher itself", "of the restart", "a folder")
        if not (watch.restarts and any(words in first for words in while_restarted)):
            yield f"{first} in place of {expected}"


MOST_SECONDS = {
    **dict.fromkeys(STOPS, 0.1),
    What.KEEPER_KILLED: 1.1,
    What.STUB_KILLED: 1.1,
    **dict.fromkeys(LOSSES, 19.1),
    **dict.fromkeys(FAILURES, 2.7),
    What.TORCHRUN_KILLED: 1.3,
    What.RUNNER_KILLED: 1.1,
    What.TORCHRUN_TOLD: 1.3,
}


@promise(
    "A rank's own failure counts most (nothing is waited for)",
    unless=(*SLOW, *HELD, *faults.HANGS, What.HANGS, What.FORGIVEN),
)
def decides_in_time(watch: Watch) -> Iterator[str]:
    """And no longer, nor for others than it says."""
    first = watch.faults[0] if watch.faults else None
    if first is None or first.time < 3 or watch.decided is None or watch.job.plan.max_restarts:
        return
    through = all(rank.exit_code == 0 for rank in watch.ranks)
    bounds = []
    for one in [one for one in watch.faults if one.time == first.time]:
        tells = one.fault.what not in LOSSES  # the first host, and not its connection
        if through or (tells and {one.machine, watch.job.machines[0]} & lost(watch)):
            return
        late = one.fault.amount if one.fault.what in FAILURES else 0.0
        by = one.time + late + 0.1
        if late and any(stop.time < by for stop in has(watch, *STOPS)):
            late += Cause.SECONDARY.patience  # it is not told once its host is stopped
        bounds.append(MOST_SECONDS.get(one.fault.what, math.inf) + late)
    if watch.decided[0] > first.time + max(bounds):
        yield f"it decides {watch.decided[0] - first.time:.2f} s after: {first.fault.what.value}"


@promise("that rank's exception is the first line of each host's failure reason")
def cause_is_true(watch: Watch) -> Iterator[str]:
    """And the exit code is that rank's; what else is named is what the plan broke."""
    for launcher, result in ended(watch):
        if result.exit_code and not result.stop_signal and not is_true(watch, result):
            line = result.text.partition("\n")[0]
            yield f"{launcher.machine.name} exits with {result.exit_code} and says: {line}"


@promise("the first rank that had ended with exit code 0 before is named before it")
def who_left_is_named(watch: Watch) -> Iterator[str]:
    """Or that ended after it, and only one that did, if it says no more than that one broke."""
    if watch.decided is None or "Connection closed by peer" not in watch.decided[1].text:
        return
    (first, *others), attempt = watch.decided[1].text.splitlines(), watch.attempt
    known = [one for one in watch.failures if one.attempt == attempt]
    told = next((one for one in known if one.failure.headline in (first, *others)), None)
    if told is None:
        return  # what the watch has seen stands in its place
    failed_at = told.time - told.failure.age
    of_it = [rank for rank in watch.ranks if (rank.attempt, rank.exit_code) == (attempt, 0)]
    word = r"(had ended|was ending|were ending) with exit code 0"
    named = re.search(rf", rank (\d+)(?: and (\d+) more)? {word}", first)
    had_ended = bool(named) and named[3] == "had ended"
    if named:
        by = failed_at + 0.1 if had_ended else math.inf
        left = [one.rank for one in of_it if min(one.script_ended, one.ended) < by]
        if int(named[1]) not in left or int(named[2] or 0) > len(left) - 1:
            yield f"{named[0]}, but that is true of {left}"
    sees = not (lost(watch) or planned(watch, *SLOW, *TORCHRUNS))
    gone = [rank for rank in of_it if rank.ended < failed_at - 0.1]
    if gone and sees and not had_ended:
        yield f"rank {gone[0].rank} had ended with 0 at {gone[0].ended:.3f} s, and is not named"


@promise(
    "Of two failures of one host the first is told first",
    unless=(*SLOW, What.FORGIVEN, What.LINGERS),
)
def first_of_a_host(watch: Watch) -> Iterator[str]:
    """If what the ranks did is all that went wrong, and each was to say it in time."""
    own = {one.rank: one for one in has(watch, *FAILURES) if one.rank}
    named = re.match(r"\S+, rank (\d+) ", watch.decided[1].text) if watch.decided else None
    if len(own) != len(watch.faults) or not named:
        return
    says = {rank: said_at(one) for rank, one in own.items()}
    last = [rank for rank in own if rank.attempt == watch.attempt]
    for told in [rank for rank in last if rank.rank == int(named[1])]:
        for rank in last:
            is_before = says[rank] < says[told] - 0.05 and rank.machine is told.machine
            if is_before and not rank.heard:
                yield f"rank {told.rank} is named, but rank {rank.rank} failed before"


@promise("one failure is one restart on all hosts", unless=(What.FORGIVEN, What.GPU_FAILS))
def restarts(watch: Watch) -> Iterator[str]:
    """And all hosts start each attempt, when nothing of the one before is left on any host."""
    plan = watch.job.plan
    harmless = (What.STUCK, What.LEFT_STUCK, What.HOST_SLOW, What.SAVES_LONGER, What.STARTS_SLOWLY)
    only_ranks = all(fault.what in (*FAILURES, *harmless) for fault in plan.faults)
    only_ranks = only_ranks and not any(_survives(one) for one in watch.job.processes.values())
    only_ranks = only_ranks and not (plan.hang_timeout and has(watch, *HELD))  # a failure as well
    only_ranks = only_ranks and plan.start_timeout >= Plan().start_timeout  # or else it may be over
    failed = has(watch, *FAILURES)
    if not only_ranks or not failed or len(failed) > plan.max_restarts:
        return
    for launcher in launchers(watch):
        if launcher.result != Result(0):
            yield f"{launcher.machine.name} ends with {launcher.result}"
    if len(watch.restarts) > len(failed):
        yield f"{len(watch.restarts)} restarts for {len(failed)} failures"


@promise("What hardware broke is not restarted on the same host")
def broken_hardware_is_left(watch: Watch) -> Iterator[str]:
    """As a rank has said; and where it is said, it is true."""
    broken = has(watch, What.GPU_FAILS) if watch.job.plan.script.is_python else []
    for at, _, attempt in watch.started:
        for one in broken:
            if one.rank and one.rank.attempt < attempt:
                yield f"attempt {attempt} starts at {at:.3f} s: {one.fault.what.value}"
    for launcher, result in ended(watch):
        said = re.search(rf"\n{NO_RESTART}(\S+), rank .* reports ", result.text)
        if said and not any(one.machine.name == said[1] for one in broken):
            yield f"{launcher.machine.name} says: {said[0]}"


def _survives(process: Process) -> bool:
    """Tell whether a process has survived SIGKILL for about 5 s, or would."""
    by = process.killed_at + STUCK - 2 * AGAIN - 0.05
    return process.held_until > -math.inf and (process.runs or process.ended > by)


@promise("If a process survives SIGKILL for 5 s, it may hold what the next attempt needs")
def nothing_is_left(watch: Watch) -> Iterator[str]:
    """All hosts start an attempt when nothing of the one before is left on any host."""
    first: dict[int, float] = {}
    for at, _, attempt in watch.started:
        first[attempt] = min(at, first.get(attempt, at))
    for process in watch.job.processes.values():
        at = first.get(process.attempt + 1, math.inf) if process.attempt else math.inf
        if process.ended > at:
            yield f"process {process.pid} runs when attempt {process.attempt + 1} starts"


@promise(
    "SIGTERM on one host stops all of them, each with its full grace",
    unless=(*faults.MISCONFIGURED, *SLOW, What.HOST_LATE),
)
def stop_is_a_stop(watch: Watch) -> Iterator[str]:
    """If it came first, and some rank was still to succeed."""
    first = watch.faults[0] if watch.faults else None
    if not first or first.fault.what not in STOPS or watch.job.plan.runner is not None:
        return
    others = [one.time for one in watch.faults if one.fault.what not in STOPS]
    went_on = any(rank.ended > first.time + 0.5 for rank in watch.ranks)
    for launcher, result in ended(watch) if min(others, default=math.inf) >= first.time + 1 else ():
        success = result == Result(0) and watch.started and not went_on
        if not result.stop_signal and not success:
            yield f"{launcher.machine.name} ends with {result}"


@promise("| ranks are being restarted | a stop | stopped", unless=SLOW)
def no_stop_is_lost(watch: Watch) -> Iterator[str]:
    """Whatever else has happened: no job succeeds whose ranks were stopped."""
    for one in has(watch, *STOPS):
        runners = [machine.runner for machine in watch.job.machines if machine.runner]
        went_on = any(
            one.time + 1.1 < process.ended < math.inf for process in watch.ranks + runners
        )
        for launcher, result in ended(watch) if went_on and not has(watch, What.FORGIVEN) else ():
            # Each host's program goes on by itself when all ranks have succeeded.
            is_told = watch.job.plan.runner is None or launcher.machine is one.machine
            if result == Result(0) and is_told:
                yield f"{launcher.machine.name} succeeds, but was stopped at {one.time:.3f} s"
        if _is_restarting(watch, one.time):
            assert watch.decided
            if not watch.decided[1].stop_signal:
                yield f"the job ends with {watch.decided[1]}, but was stopped at {one.time:.3f} s"


def _is_restarting(watch: Watch, at: float) -> bool:
    """Tell whether ranks are restarted when a stop comes and is heard of, and nothing else is."""
    odd = (*LOSSES, *TORCHRUNS, *HELD, *faults.STORES, What.LAUNCHER_FAILS)
    is_open = watch.decided is not None and watch.decided[0] >= at
    begun = [one for one in watch.restarts if one + 0.1 < at]
    if planned(watch, *odd) or not is_open or not begun:
        return False
    return not any(begun[-1] < start < at + 0.3 for start, *_ in watch.started)


@promise("| a secondary failure, and no restart is left | a stop, while the cause is waited for |")
def failure_before_stop(watch: Watch) -> Iterator[str]:
    """As with every failure that the first host has heard of before the stop."""
    if watch.decided and watch.decided[1].stop_signal:
        known = [one for one in watch.failures if one.time < watch.decided[0]]
        known = [one for one in known if one.failure.cause is not Cause.TORCHRUN_ENDS]
        last = [one for one in known if one.attempt == watch.attempt]
        restarts = last and last[0].attempt <= watch.job.plan.max_restarts
        all_of_ranks = all(one.failure.may_restart and not one.failure.broken for one in last)
        if last and known[-1] is last[-1] and not (restarts and all_of_ranks):
            yield f"stopped, but at {last[0].time:.3f} s it heard: {last[0].failure.text}"


@promise("it is answered within 4 s, whatever becomes of other hosts", unless=SLOW)
def stacks_are_shown(watch: Watch) -> Iterator[str]:
    """But the first, which answers; and unless its ranks are started again, or its host ends."""
    first = watch.job.machines[0]
    for request in watch.requests:
        at, machine, by = request.time, request.machine, request.time + 4
        ends = watch.decided and watch.decided[0] < by
        ends = ends or any(one is machine and at < start < by for start, one, _ in watch.started)
        for one in (machine, first):
            ends = ends or not one.launcher or one.launcher.ended_at < by
        if request.replied_at > by and not ends and not {machine, first} & lost(watch):
            yield f"{machine.name} is not answered, asked at {at:.3f} s"


@promise("no failure file is written")
def stop_says_nothing(watch: Watch) -> Iterator[str]:
    """After a stop; what fails says why."""
    for launcher, result in ended(watch):
        if result.stop_signal and (result.text or result.exit_code != 128 + result.stop_signal):
            yield f"{launcher.machine.name} ends with {result}"
        elif result.exit_code and not result.stop_signal and not result.text.strip():
            yield f"{launcher.machine.name} does not say why it ends with {result.exit_code}"


@promise("all hosts end within seconds and give the same reason")
def ends_in_time(watch: Watch) -> Iterator[str]:
    """Within all times of the page hosts.md, added up, unless something hangs that nobody sees."""
    left = has(watch, What.FORGIVEN, What.LEAVES)
    hangs = has(watch, What.HANGS, What.TORCHRUN_HANGS, *HELD)
    hangs = hangs or (not watch.decided and has(watch, What.KEEPER_HANGS))
    hangs = hangs or (watch.job.plan.script.at_break is AtBreak.WAITS and left)
    for launcher in launchers(watch):
        if launcher.runs and not hangs:
            yield f"{launcher.machine.name} is {type(launcher.state.phase).__name__}"
    odd = planned(watch, What.PORT_TAKEN)
    if watch.job.plan.hosts == 1 or odd or watch.job.plan.runner is not None:
        return
    slack = 1 + seconds_of(watch, *PAUSES) + 4 * seconds_of(watch, What.DELAY)
    for launcher, result in ended(watch):
        since, bound = _bound(watch, launcher, result)
        if launcher.started_at < since and launcher.ended_at > since + bound + slack:
            late = launcher.ended_at - since
            yield f"{launcher.machine.name} ends {late:.1f} s after it could know, not {bound:g}"


def _bound(watch: Watch, launcher: Launcher, result: Result) -> tuple[float, float]:
    """Return since when a host can know how it ends, and within how many seconds it is to."""
    plan, failed = watch.job.plan, has(watch, What.LAUNCHER_FAILS)
    # All hosts clear, though one of them may be lost; the first leaves 5 s after the others.
    # Keepers whose launcher has failed itself give a rank the grace of a stop.
    is_stop = failed or any(one.stopping_since < math.inf for one in launchers(watch))
    bound = (plan.grace if is_stop else plan.failure_grace) + 5.0
    if any(one.machine is launcher.machine for one in failed):
        bound = plan.grace + 10  # its keepers have lost it, and give their ranks the grace
    if has(watch, *HELD, *faults.HANGS, *faults.KEEPERS):
        bound += plan.failure_grace + GONE_SECONDS + STUCK
    if has(watch, What.KEEPER_HANGS):
        bound += plan.grace + GIVES_UP[1] + 10  # that of the coordinator
    bound += len(has(watch, *LOSSES)) * (GIVES_UP[1] + plan.failure_grace)
    decided = watch.decided[0] if watch.decided else launcher.ended_at
    # Keepers that lose their launcher while they stop give the grace anew.
    decided = max([decided, *(one.time for one in failed if one.machine is launcher.machine)])
    here = (launcher.machine, watch.job.machines[0])
    silent = "has not answered" in result.text  # or else it was stopped, and no loss
    losses = [one for one in LOSSES if silent or one is not What.LAUNCHER_STOPS]
    away = min((one.time for one in has(watch, *losses) if one.machine in here), default=math.inf)
    if launcher.torchrun is None:
        # In that time it tells the others; one that is not heard waits for the start time-out.
        alone = away < math.inf or planned(watch, *SLOW)
        bound = plan.start_timeout if alone else 8 + len(has(watch, *LOSSES)) * GIVES_UP[1]
    found = SILENCE if silent else GIVES_UP[1]
    return (away, bound + found) if away <= decided else (decided, bound)
