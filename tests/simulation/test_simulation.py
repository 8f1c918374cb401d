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
from simulation.planting import HERE, Case, cases, planted
from simulation.search import report, search

JOBS = 350  # of one seed
SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_promises_are_kept(seed: int) -> None:
    found = search(seed, JOBS)
    assert found is None, report(found, seed)


@pytest.mark.parametrize("mistake", cases(HERE / "mistakes.txt"), ids=lambda case: case.what)
def test_a_planted_mistake_is_found(mistake: Case) -> None:
    assert broken(Job(mistake.plan).run()) == []
    with planted(mistake):
        assert mistake.promise in {one.promise for one in broken(Job(mistake.plan).run())}


@pytest.mark.parametrize("case", cases(HERE / "jobs.txt"), ids=lambda case: case.what)
def test_a_job_keeps_all_promises(case: Case) -> None:
    job = Job(case.plan)
    assert broken(job.run()) == []
    if case.end:
        (result,) = results(job)
        assert result and f"{result.exit_code} {result.text}".startswith(case.end)


def results(job: Job) -> set[Result | None]:
    """Return how a job's launchers have ended."""
    return {machine.launcher.result for machine in job.machines if machine.launcher}


FAILS_AND_STOPS = Plan(
    hosts=3,
    script=Script(at_stop=AtStop.FAILS, at_break=AtBreak.ABORTS, upload=20.0),
    faults=(Fault(What.RAISES, 3.0, host=1, amount=1.0), Fault(What.STOP, 3.2)),
    seed=7,
)


def test_a_plan_gives_the_same_job_again_traced_or_not() -> None:
    """The trace has the phases of every machine, one after the other, to the end."""
    assert read(written(FAILS_AND_STOPS)) == FAILS_AND_STOPS
    quiet, traced = Job(FAILS_AND_STOPS), Job(FAILS_AND_STOPS, trace=True)
    lived = [
        [(process.heard, process.ended) for process in one.run().job.processes.values()]
        for one in (quiet, traced)
    ]
    assert lived[0] == lived[1] and results(quiet) == results(traced)
    assert traced.watch.trace == Job(FAILS_AND_STOPS, trace=True).run().trace
    step = r" (\S+) +log: \d+\.\d{3} s: (run|hosts) ([\w ()]+?)(?: to ([\w ()]+?))? on \w"
    phases: dict[tuple[str, str], str] = {}
    for host, machine, before, after in re.findall(step, "\n".join(traced.watch.trace or ())):
        assert phases.setdefault((host, machine), before) == before
        phases[host, machine] = after or before
    assert sorted(phases.values()) == ["Done"] * 3 + ["Ended"] + ["Left"] * 2
    assert None not in results(quiet) and Result(0) not in results(quiet)
