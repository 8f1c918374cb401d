"""Every promise is kept in thousands of simulated jobs, and every planted mistake breaks one.

What a failing test prints replays it: `make simulate PLAN='Plan(...)'`.
"""

from __future__ import annotations

import functools
import re

import pytest

from launcher.result.causes import Result
from simulation import launcher
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


# Jobs that broke a promise once, and that few others are like.
ONCE_BROKEN = [
    Plan(  # neither starts nor listens, and stands still in between
        faults=(
            Fault(What.LAUNCHER_PAUSES, 0.4, amount=4.0),
            Fault(What.CANNOT_START, 0.4),
            Fault(What.PORT_TAKEN, host=1, amount=20.0),
        ),
        seed=222,
    ),
    Plan(  # Ctrl-C between a restart's SIGTERM and the ranks' end
        hosts=9,
        script=Script(at_stop=AtStop.DIES, upload=20.0),
        max_restarts=1,
        faults=(Fault(What.CRASHES, 3.1, host=2), Fault(What.CTRL_C, 3.4, host=5)),
        seed=53,
    ),
    Plan(  # a host alone has nobody to be cut off from
        hosts=1,
        script=Script(at_break=AtBreak.WAITS),
        faults=(Fault(What.CUT, 5.0), Fault(What.RAISES, 7.0, amount=20.0)),
        seed=129,
    ),
    Plan(  # a rank has broken its connections, and is stuck in the kernel before it says why
        faults=(
            Fault(What.RAISES, 2.8, host=1),
            Fault(What.STUCK, 2.8, host=1, amount=12.0),
        ),
        seed=30,
    ),
    Plan(  # a keeper hangs, and another host's launcher fails
        nproc=2,
        faults=(
            Fault(What.KEEPER_HANGS, 5.0, local_rank=1),
            Fault(What.LAUNCHER_FAILS, 19.0, host=1),
        ),
        seed=234,
    ),
    Plan(  # a coordinator fails that waits for a host which has vanished
        hosts=9,
        faults=(Fault(What.DIFFERS, 0.2, host=6), Fault(What.HOST_VANISHES, 0.22, host=8)),
        seed=165,
    ),
]


@pytest.mark.parametrize("plan", ONCE_BROKEN)
def test_a_job_that_once_broke_a_promise_keeps_all(plan: Plan) -> None:
    assert broken(Job(plan).run()) == []


@pytest.mark.parametrize("seconds", [20.0, 90.0])
def test_a_first_host_that_stands_still_while_others_join_starts_the_job(seconds: float) -> None:
    """However long: nobody has been welcomed yet, and the start timeout bounds it."""
    late, stops = Fault(What.HOST_LATE, 0.0, 1, amount=1.0), Fault(What.LAUNCHER_STOPS, 0.6)
    plan = Plan(start_timeout=200.0, faults=(late, stops._replace(amount=seconds)))
    job = Job(plan)
    assert broken(job.run()) == []
    assert [one.launcher and one.launcher.result for one in job.machines] == [Result(0)] * 2


def test_hosts_that_stand_still_together_lose_nobody() -> None:
    """As on a machine that slept: none knows how long the others were silent."""
    stops = [Fault(What.LAUNCHER_STOPS, 4.0, host, amount=200.0) for host in range(3)]
    job = Job(Plan(hosts=3, faults=tuple(stops)))
    assert broken(job.run()) == []
    assert [one.launcher and one.launcher.result for one in job.machines] == [Result(0)] * 3


def test_a_launcher_that_is_silent_is_lost() -> None:
    stops = Fault(What.LAUNCHER_STOPS, 4.0, 1, amount=200.0)
    job = Job(Plan(script=Script(seconds=300.0), faults=(stops,)))
    assert broken(job.run()) == []
    says = "algo-0002 was lost: its launcher has not answered for 60 s"
    assert all(one.launcher.result.text.startswith(says) for one in job.machines if one.launcher)


def test_a_thousand_hosts_end_together() -> None:
    plan = Plan(hosts=1000, nproc=2, faults=(Fault(What.RAISES, 5.0, host=600),))
    job = Job(plan)
    assert not broken(job.run())
    results = [machine.launcher.result for machine in job.machines if machine.launcher]
    assert results == [results[0]] * 1000 and results[0]
    assert results[0].text.startswith("algo-0601, rank 1200 (local rank 0) failed with ValueError")


@pytest.mark.parametrize("what", [What.STUCK, What.LEFT_STUCK])
@pytest.mark.parametrize(("seconds", "starts"), [(0.0, 2), (7.0, 4), (20.0, 2)])
def test_there_is_no_restart_if_a_process_survives_sigkill(
    what: What, seconds: float, starts: int
) -> None:
    """For 5 s: one that the kernel lets go before is none."""
    plan = Plan(
        script=Script(upload=20.0),
        max_restarts=1,
        faults=(Fault(what, 3.0, amount=seconds), Fault(What.RAISES, 3.5, host=1)),
    )
    job = Job(plan)
    seen = job.run()
    assert broken(seen) == []
    results = {machine.launcher.result for machine in job.machines if machine.launcher}
    assert [result and result.exit_code for result in results] == [0 if starts == 4 else 1]
    assert len(seen.started) == starts


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (What.STORE_FAILS, "no restart: OSError: no address"),
        (What.STORE_KILLED, "no restart: the process that holds the ranks' store has ended"),
        (What.STORE_SLOW, "no restart: algo-0001 did not make the next attempt's store within"),
    ],
)
def test_there_is_no_restart_without_a_store(what: What, says: str) -> None:
    faults = (Fault(what, 3.0, amount=200.0), Fault(What.RAISES, 5.0, host=1))
    job = Job(Plan(max_restarts=1, faults=faults))
    assert broken(job.run()) == []
    results = {machine.launcher.result for machine in job.machines if machine.launcher}
    (result,) = results
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


def test_a_verbose_job_says_every_step_and_is_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the phases of every machine, one after the other, to the end."""
    quiet = Job(FAILS_AND_STOPS, trace=True).run()
    monkeypatch.setattr(launcher, "Options", functools.partial(launcher.Options, verbose=True))
    verbose = Job(FAILS_AND_STOPS, trace=True).run()
    log = r"^ *\S+ +(\S+) .* log: \d+\.\d{3} s: "
    step = re.compile(log + r"(run|hosts) ([\w ()]+?)(?: to ([\w ()]+?))? on \w")
    assert verbose.trace and quiet.trace
    steps = [found for line in verbose.trace if (found := step.search(line))]
    assert [line for line in verbose.trace if not step.search(line)] == quiet.trace
    phases: dict[tuple[str, str], str] = {}
    for host, machine, before, after in (found.groups() for found in steps):
        assert phases.setdefault((host, machine), before) == before
        phases[host, machine] = after or before
    assert sorted(phases.values()) == ["Done"] * 3 + ["Ended"] + ["Left"] * 2
    assert all(one.launcher and one.launcher.result for one in quiet.job.machines)
    assert quiet.job.machines[0].launcher.result != Result(0)  # type: ignore[union-attr]
