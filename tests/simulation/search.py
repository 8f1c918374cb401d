"""Runs many simulated jobs, and makes a small plan of one that breaks a promise."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from simulation.job import Job
from simulation.plan import Plan, Script, written
from simulation.promises import broken
from simulation.strategies import drawn
from simulation.watch import Broken


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


def search(seed: int, jobs: int) -> Found | None:
    """Run `jobs` jobs; return the first that breaks a promise."""
    by = random.Random(seed)
    for count in range(1, jobs + 1):
        plan = drawn(by)
        found = run(plan)
        if found:
            return Found(plan, found, count)
    return None


def smaller(found: Found) -> Found:
    """Make a plan as small as it can be that still breaks the same promise."""
    promise = found.broken[0].promise
    for plan in _simpler(found.plan):
        still = run(plan)
        if still and still[0].promise == promise:
            return smaller(Found(plan, still, found.jobs))
    return found


def _simpler(plan: Plan) -> Iterator[Plan]:
    """Yield plans with one thing less."""
    faults = plan.faults
    for index in range(len(faults)):
        yield plan._replace(faults=faults[:index] + faults[index + 1 :])
    used = max([fault.host for fault in faults], default=0) + 1
    for hosts in {1, used, max(used, plan.hosts - 1)}:
        if used <= hosts < plan.hosts:
            yield plan._replace(hosts=hosts)
    if plan.nproc > 1 and not any(fault.local_rank for fault in faults):
        yield plan._replace(nproc=1)
    for name, value in Script()._asdict().items():
        if getattr(plan.script, name) != value:
            yield plan._replace(script=plan.script._replace(**{name: value}))
    if plan.max_restarts:
        yield plan._replace(max_restarts=plan.max_restarts - 1)


def report(found: Found, seed: int) -> str:
    """Return what people need to see: what is broken, the plan, how to replay it, and its trace."""
    found = smaller(found)
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
