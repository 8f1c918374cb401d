"""Runs many simulated jobs, and makes a small plan of one that breaks a promise."""

from __future__ import annotations

import traceback
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from simulation.job import Job
from simulation.plan import Plan, written
from simulation.promises import broken
from simulation.strategies import plans
from simulation.watch import Broken


class BrokenPromise(AssertionError):
    """A job has not kept what the launcher promises."""


class Found(NamedTuple):
    """A plan of a job that breaks promises, and how many jobs were run until it was drawn."""

    plan: Plan
    broken: list[Broken]
    jobs: int


def run(plan: Plan) -> list[Broken]:
    """Run one job; return the promises that it breaks."""
    try:
        return broken(Job(plan).run())
    except Exception:
        return [Broken("Nothing raises", traceback.format_exc())]


def search(seed: int, jobs: int, *, shrink: bool = True) -> tuple[Found | None, int]:
    """Run so many jobs; return the first that breaks a promise, made small, and their number."""
    last: list[tuple[Plan, list[Broken]]] = []
    count = 0
    drawn = 0

    def check(plan: Plan) -> None:
        nonlocal count, drawn
        count += 1
        found = run(plan)
        if found:
            drawn = drawn or count
            last.append((plan, found))
            raise BrokenPromise(found[0].promise)

    options = settings(
        max_examples=jobs,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    try:
        seeded(seed)(options(given(plans())(check)))()
    except BrokenPromise:
        plan, found = last[-1]
        return Found(plan, found, drawn), count
    return None, count


def report(found: Found, seed: int) -> str:
    """Return what people need to see: what is broken, the plan, how to replay it, and its trace."""
    job = Job(found.plan, trace=True)
    try:
        job.run()
    except Exception:
        pass  # it is among what is broken
    text = written(found.plan)
    lines = [f"{one.promise}: {one.how}" for one in found.broken]
    lines += [
        f"\nfound by seed {seed} in job {found.jobs}; to replay it:",
        f"make simulate PLAN='{text}'",
        "\n      time  host       phase      event or action",
        *(job.watch.trace or ()),
    ]
    return "\n".join(lines)
