"""Every promise is kept in thousands of simulated jobs, and every planted mistake breaks one.

What a failing test prints replays it: `make simulate PLAN='Plan(...)'`.
"""

from __future__ import annotations

import re

import pytest

from launcher.result.causes import Result
from simulation.facts import broken
from simulation.job import Job
from simulation.plan import AtBreak, AtStop, Fault, Plan, Script, What, read, written
from simulation.planting import Mistake, mistakes, planted
from simulation.search import report, search

JOBS = 350  # of one seed
SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_promises_are_kept(seed: int) -> None:
    found = search(seed, JOBS)
    assert found is None, report(found, seed)


@pytest.mark.parametrize("mistake", mistakes(), ids=lambda mistake: mistake.what)
def test_a_planted_mistake_is_found(mistake: Mistake) -> None:
    assert broken(Job(mistake.plan).run()) == []
    with planted(mistake):
        assert mistake.promise in {one.promise for one in broken(Job(mistake.plan).run())}


def fault(what: What, at: float, host: int = 0, amount: float = 0.0, rank: int = 0) -> Fault:
    return Fault(what, at, host, rank, amount)


# Jobs that broke a promise once, and that few others are like.
ONCE_BROKEN = {
    "neither starts nor listens, and stands still in between": Plan(seed=222, faults=(
        fault(What.LAUNCHER_PAUSES, 0.4, amount=4.0), fault(What.CANNOT_START, 0.4),
        fault(What.PORT_TAKEN, 0.0, amount=20.0))),
    "Ctrl-C between a restart's SIGTERM and the ranks' end": Plan(
        9, 1, Script(at_stop=AtStop.DIES, upload=20.0), max_restarts=1, seed=53,
        faults=(fault(What.CRASHES, 3.1, 2), fault(What.CTRL_C, 3.4, 5))),
    "a host alone has nobody to be cut off from": Plan(
        1, 1, Script(at_break=AtBreak.WAITS), seed=129,
        faults=(fault(What.CUT, 5.0), fault(What.RAISES, 7.0, amount=20.0))),
    "a rank has broken its connections, and is stuck before it says why": Plan(seed=30, faults=(
        fault(What.RAISES, 2.8, 1), fault(What.STUCK, 2.8, 1, amount=12.0))),
    "a keeper hangs, and another host's launcher fails": Plan(nproc=2, seed=234, faults=(
        fault(What.KEEPER_HANGS, 5.0, rank=1), fault(What.LAUNCHER_FAILS, 19.0, 1))),
    "a coordinator fails that waits for a host which has vanished": Plan(9, seed=165, faults=(
        fault(What.DIFFERS, 0.2, 6), fault(What.HOST_VANISHES, 0.22, 8))),
    "Ctrl-C three times of a slow host, with another one missing": Plan(3, seed=7, faults=(
        fault(What.DELAY, 0.0, 1, 1.5), fault(What.HOST_LATE, 0.0, 2, 4.0),
        fault(What.CTRL_C_THRICE, 4.2, 1))),
    "torchrun is stuck, and ends when it was given up on almost": Plan(
        3, script=Script(upload=100.0), seed=7, faults=(
            fault(What.LEFT_STUCK, 9.0), fault(What.ENDS, 10.0),
            fault(What.TORCHRUN_STUCK, 14.0, amount=12.0))),
    "a launcher stands still, and hears of a killed stub after those that torchrun ends": Plan(
        nproc=2, seed=174, faults=(
            fault(What.LAUNCHER_PAUSES, 3.0, 1, 4.0), fault(What.STUB_KILLED, 5.6, 1))),
    "the store is gone before the ranks of the next attempt use it": Plan(
        1, script=Script(at_break=AtBreak.GOES_ON), max_restarts=1, seed=3, faults=(
            fault(What.RAISES, 5.0), fault(What.STORE_KILLED, 5.04))),
    "a program works on a host that was stopped just before it heard that all have succeeded": Plan(
        3, script=Script(seconds=3.0), seed=230, runner=1000.0, faults=(
            fault(What.STOP, 5.0, 2),)),
    "somebody asks for stacks just before a restart, and again after it": Plan(
        1, nproc=2, max_restarts=1, seed=171, watch=5.0, hang_timeout=10.0, faults=(
            fault(What.HANGS, 4.0), fault(What.STACKS, 30.5), fault(What.STACKS, 31.1))),
    "torchrun ends a stub that has forked no keeper yet": Plan(
        1, script=Script(seconds=30.0, save_code=143), seed=130, faults=(
            fault(What.STARTS_SLOWLY, 0.0, amount=4.0), fault(What.TORCHRUN_TOLD, 3.3))),
    "a keeper is killed as a restart begins": Plan(
        script=Script(at_stop=AtStop.DIES), max_restarts=1, seed=108, faults=(
            fault(What.ENDS, 2.4), fault(What.KEEPER_KILLED, 2.42, 1))),
    **{f"a launcher stands still, and hears first of another host's torchrun ({seed})": Plan(
        script=Script(at_break=AtBreak.WAITS), seed=seed, faults=(
            fault(What.LAUNCHER_PAUSES, 1.0, amount=4.0), fault(What.TORCHRUN_KILLED, 2.02)))
        for seed in (64, 125)},
    "a slow launcher hears of a stop, and of the end of what runs torchrun": Plan(
        script=Script(seconds=3.0), seed=150, runner=0.0, faults=(
            fault(What.HOST_SLOW, 0.0, 1, 2.0), fault(What.STOP, 7.0),
            fault(What.LAUNCHER_PAUSES, 7.0, amount=1.0))),
    "two ranks of a host crash at once": Plan(1, 2, seed=170, faults=(
        fault(What.CRASHES, 3.1, rank=1), fault(What.KILLED, 3.1))),
}  # fmt: skip


@pytest.mark.parametrize("plan", ONCE_BROKEN.values(), ids=ONCE_BROKEN)
def test_a_job_that_once_broke_a_promise_keeps_all(plan: Plan) -> None:
    assert broken(Job(plan).run()) == []


# Launchers that stand still: a first host while others join, however long, as nobody has been
# welcomed yet, and the start timeout bounds it; all together, as on a machine that slept, where
# none knows how long the others were silent.
LATE = fault(What.HOST_LATE, 0.0, 1, 1.0)
STAND_STILL = [
    *((2, (LATE, fault(What.LAUNCHER_STOPS, 0.6, amount=seconds))) for seconds in (20.0, 90.0)),
    (3, tuple(fault(What.LAUNCHER_STOPS, 4.0, host, 200.0) for host in range(3))),
]


@pytest.mark.parametrize(("hosts", "faults"), STAND_STILL)
def test_launchers_that_stand_still_lose_nobody(hosts: int, faults: tuple[Fault, ...]) -> None:
    job = Job(Plan(hosts, start_timeout=200.0, faults=faults))
    assert broken(job.run()) == []
    assert results(job) == {Result(0)}


def results(job: Job) -> set[Result | None]:
    """Return how a job's launchers have ended."""
    return {machine.launcher.result for machine in job.machines if machine.launcher}


def test_a_launcher_that_is_silent_is_lost() -> None:
    stops = Fault(What.LAUNCHER_STOPS, 4.0, 1, amount=200.0)
    job = Job(Plan(script=Script(seconds=300.0), faults=(stops,)))
    assert broken(job.run()) == []
    says = "algo-0002 was lost: its launcher has not answered for 60 s"
    assert all(one.launcher.result.text.startswith(says) for one in job.machines if one.launcher)


def test_a_thousand_hosts_end_together() -> None:
    job = Job(Plan(1000, 2, faults=(fault(What.RAISES, 5.0, 600),)))
    assert broken(job.run()) == []
    (result,) = results(job)
    says = "algo-0601, rank 1200 (local rank 0) failed with ValueError"
    assert result and result.text.startswith(says)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (What.STORE_FAILS, "no restart: OSError: no address"),
        (What.STORE_KILLED, "no restart: the process that holds the ranks' store has ended"),
        (What.STORE_SLOW, "no restart: algo-0001 did not make the next attempt's store within"),
    ],
)
def test_there_is_no_restart_without_a_store(what: What, says: str) -> None:
    faults = (fault(what, 3.0, amount=200.0), fault(What.RAISES, 5.0, 1))
    job = Job(Plan(max_restarts=1, faults=faults))
    assert broken(job.run()) == []
    (result,) = results(job)
    assert result and result.exit_code == 1 and result.text.split("\n")[1].startswith(says)


FAILS_AND_STOPS = Plan(
    hosts=3,
    script=Script(at_stop=AtStop.FAILS, at_break=AtBreak.ABORTS, upload=20.0),
    faults=(Fault(What.RAISES, 3.0, host=1, amount=1.0), Fault(What.STOP, 3.2)),
    seed=7,
)


def test_a_plan_gives_the_same_job_again() -> None:
    assert read(written(FAILS_AND_STOPS)) == FAILS_AND_STOPS
    first, second = (Job(FAILS_AND_STOPS, trace=True).run().trace for _ in range(2))
    assert first == second


def test_a_traced_job_says_every_step_and_is_the_same_job() -> None:
    """The log has the phases of every machine, one after the other, to the end."""
    quiet, traced = Job(FAILS_AND_STOPS), Job(FAILS_AND_STOPS, trace=True)
    lived = [
        [(process.heard, process.ended) for process in one.run().job.processes.values()]
        for one in (quiet, traced)
    ]
    assert lived[0] == lived[1] and results(quiet) == results(traced)
    step = r" (\S+) +log: \d+\.\d{3} s: (run|hosts) ([\w ()]+?)(?: to ([\w ()]+?))? on \w"
    phases: dict[tuple[str, str], str] = {}
    for host, machine, before, after in re.findall(step, "\n".join(traced.watch.trace or ())):
        assert phases.setdefault((host, machine), before) == before
        phases[host, machine] = after or before
    assert sorted(phases.values()) == ["Done"] * 3 + ["Ended"] + ["Left"] * 2
    assert None not in results(quiet) and Result(0) not in results(quiet)
