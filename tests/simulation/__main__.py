"""Simulates many jobs, or one again, or shows how soon planted mistakes are found.

make simulate JOBS=1000000 SEED=100
make simulate PLAN='Plan(hosts=2, faults=(Fault(What.STOP, at=3.0),))'
make simulate MISTAKES=1
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

from simulation.job import Job
from simulation.plan import read, written
from simulation.planting import HERE, cases, planted
from simulation.search import report, run, search, smaller, told

OF_A_SEED = 1000  # jobs


def one(seed: int, jobs: int) -> tuple[int, str]:
    """Run the jobs of one seed; return how many were run, and what was found."""
    found = search(seed, jobs)
    return (found.jobs, report(found, seed)) if found else (jobs, "")


def many(jobs: int, seed: int, processes: int) -> int:
    """Run jobs on all cores, with a line that says how far it is."""
    started, done, failed = time.monotonic(), 0, 0
    seeds = range(seed, seed + -(-jobs // OF_A_SEED))
    with ProcessPoolExecutor(processes) as pool:
        running = [pool.submit(one, seed, min(OF_A_SEED, jobs)) for seed in seeds]
        for future in as_completed(running):
            count, text = future.result()
            done, failed = done + count, failed + bool(text)
            if text:
                print(f"\n{text}\n", flush=True)
            rate = done / (time.monotonic() - started)
            line = f"\r{done:,} of {jobs:,} jobs, {rate:,.0f}/s, {failed} seeds failed "
            print(line, end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    print(
        f"\n{done:,} jobs of the seeds {seeds[0]} to {seeds[-1]} in {seconds:.0f} s on {processes} "
        f"cores; a promise was broken with {failed} seeds"
    )
    return 1 if failed else 0


def how_soon(jobs: int) -> int:
    """Plant each mistake; print how many jobs it takes to find it, and the smallest of those."""
    missed = 0
    for mistake in cases(HERE / "mistakes.txt"):
        with planted(mistake):
            found = search(0, jobs)
            missed += not found
            print(f"{found.jobs if found else 'not found'}: {mistake.what}", flush=True)
            if found:
                found = smaller(found)
                print(f"! {found.broken[0].promise}\n> {written(found.plan)}", flush=True)
    return 1 if missed else 0


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m simulation")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--replay", metavar="PLAN")
    parser.add_argument("--mistakes", action="store_true")
    chosen = parser.parse_args()
    if chosen.replay:
        plan = read(chosen.replay)
        print(*told(plan), sep="\n")
        return 1 if run(Job(plan)) else 0
    if chosen.mistakes:
        return how_soon(chosen.jobs)
    return many(chosen.jobs, chosen.seed, chosen.processes)


if __name__ == "__main__":
    sys.exit(main())
