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


def run(job: Job) -> list[Broken]:
    """Run a job; return the promises that it breaks; what it raises is one of these."""
    try:
        return broken(job.run())
    except Exception:
        return [Broken("Nothing raises", traceback.format_exc())]


def search(seed: int, jobs: int) -> Found | None:
    """Run `jobs` jobs; return the first that breaks a promise."""
    by = random.Random(seed)
    for count in range(1, jobs + 1):
        plan = drawn(by)
        found = run(Job(plan))
        if found:
            return Found(plan, found, count)
    return None


def smaller(found: Found) -> Found:
    """Make a plan as small as it can be that still breaks the same promise."""
    promise = found.broken[0].promise
    for plan in _simpler(found.plan):
        still = run(Job(plan))
        if still and still[0].promise == promise:
            return smaller(Found(plan, still, found.jobs))
    return found


def _simpler(plan: Plan) -> Iterator[Plan]:
    """Yield plans with one thing less."""
    faults, script = plan.faults, plan.script
    for index, fault in enumerate(faults):
        rest = faults[:index], faults[index + 1 :]
        yield plan._replace(faults=rest[0] + rest[1])
        for name in ("amount", "local_rank", "host"):
            if getattr(fault, name):
                yield plan._replace(faults=(*rest[0], fault._replace(**{name: 0}), *rest[1]))
    least = {"hosts": 1 + max((one.host for one in faults), default=0), "max_restarts": 0}
    least["nproc"] = 1 + max((one.local_rank for one in faults), default=0)
    for name, fewest in least.items():
        for fewer in {fewest, max(fewest, getattr(plan, name) - 1)} - {getattr(plan, name)}:
            yield plan._replace(**{name: fewer})
    for name, value in Script()._asdict().items():
        if getattr(script, name) != value:
            yield plan._replace(script=script._replace(**{name: value}))


def told(plan: Plan) -> list[str]:
    """Return a job's trace, and the promises that it breaks."""
    job = Job(plan, trace=True)
    found = run(job)
    return [*(job.watch.trace or ()), *(f"{one.promise}: {one.how}" for one in found)]


def report(found: Found, seed: int) -> str:
    """Return what people need to see: how to replay a small plan, and what becomes of it."""
    found = smaller(found)
    lines = [
        f"{found.broken[0].promise}: {found.broken[0].how}",
        f"\nfound by seed {seed} in job {found.jobs}; to replay it:",
        f"make simulate PLAN='{written(found.plan)}'",
        "\n      time  host       log, fault or promise",
    ]
    return "\n".join(lines + told(found.plan))
