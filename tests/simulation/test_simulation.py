"""Every promise is kept in thousands of simulated jobs, and every planted mistake breaks one.

What a failing test prints replays it: `make simulate PLAN='Plan(...)'`.
"""

from __future__ import annotations

import re

import pytest

from launcher.result.causes import Result
from simulation.facts import broken
from simulation.job import Job
from simulation.plan import read, written
from simulation.planting import HERE, Case, cases, planted
from simulation.search import report, search

JOBS = 200  # of one seed
SINGLE = cases(HERE / "jobs.txt")
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


@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.what)
def test_a_job_keeps_all_promises(case: Case) -> None:
    job = Job(case.plan)
    assert broken(job.run()) == []
    if case.end:
        (result,) = results(job)
        assert result and f"{result.exit_code} {result.text}".startswith(case.end)


def results(job: Job) -> set[Result | None]:
    """Return how a job's launchers have ended."""
    return {machine.launcher.result for machine in job.machines if machine.launcher}


def test_a_plan_gives_the_same_job_again_traced_or_not() -> None:
    """The trace has the phases of every machine, one after the other, to the end."""
    (plan,) = (case.plan for case in SINGLE if "amid a failure" in case.what)
    assert read(written(plan)) == plan
    quiet, traced = Job(plan), Job(plan, trace=True)
    lived = [
        [(process.heard, process.ended) for process in one.run().job.processes.values()]
        for one in (quiet, traced)
    ]
    assert lived[0] == lived[1] and results(quiet) == results(traced)
    assert traced.watch.trace == Job(plan, trace=True).run().trace
    step = r" (\S+) +log: \d+\.\d{3} s: (run|hosts) ([\w ()]+?)(?: to ([\w ()]+?))? on \w"
    phases: dict[tuple[str, str], str] = {}
    for host, machine, before, after in re.findall(step, "\n".join(traced.watch.trace or ())):
        assert phases.setdefault((host, machine), before) == before
        phases[host, machine] = after or before
    assert sorted(phases.values()) == ["Done"] * 3 + ["Ended"] + ["Left"] * 2
    assert None not in results(quiet) and Result(0) not in results(quiet)
