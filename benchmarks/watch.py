"""What it costs to look how far ranks are: the speed of small collectives, and the coordinator.

    python benchmarks/watch.py [--pairs 5] [--seconds 15]

Two ranks of one host do small all-reduces, in turn without looks, with one each 15 s (the default)
and with one each second; the ranks' memory is measured, too, and how long a look keeps a rank's
Python. Then the ranks of 1,000 hosts, eight each, all stop at once, as far as the coordinator can
tell. Needs torch and the launcher installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launcher.peers.messages import to_wire
from launcher.watch import judge
from launcher.watch.waits import Group, NoProgressReport, StalledRank

STEPS = """
import json, resource, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
text, numbers = torch.ones(64), []
for _ in range(200):
    dist.all_reduce(text)
dist.barrier()
begin, steps, seconds = time.perf_counter(), 0, float(sys.argv[2])
go_on = torch.ones(1)
while go_on.item():
    for _ in range(100):
        dist.all_reduce(text)
    steps += 100
    go_on.fill_(float(time.perf_counter() - begin < seconds))
    dist.broadcast(go_on, 0)
if dist.get_rank() == 0:
    took, memory = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    from launcher.watch import in_rank
    begin = time.perf_counter()
    in_rank.recorded("fr")
    moving, begin = time.perf_counter() - begin, time.perf_counter()
    in_rank.groups_now()
    waiting = time.perf_counter() - begin
    with open(sys.argv[1], "w") as file:
        json.dump([steps / took, memory / 1024, 1000 * moving, 1000 * waiting], file)
dist.barrier()
time.sleep(0.1)
dist.destroy_process_group()
"""


def measured(every: int, seconds: float, folder: Path) -> list[float]:
    """Return a job's steps per second, the peak of rank 0's memory in MiB, and how many
    milliseconds a look takes it while it moves, and while it waits.
    """
    script, result = folder / "steps.py", folder / "result"
    script.write_text(STEPS)
    others = ("SM_", "PET_", "LAUNCHER_", "SAGEMAKER_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    environment.update(OMP_NUM_THREADS="1", TMPDIR=str(folder))
    options = ["--launcher-nproc-per-node", "2", "--launcher-watch", str(every)]
    words = [*options, "--train-script", str(script), str(result), str(seconds)]
    argv = [sys.executable, "-m", "launcher", *words]
    done = subprocess.run(argv, env=environment, stderr=subprocess.DEVNULL, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(argv)} failed with {done.returncode}")
    return list(json.loads(result.read_text()))


def coordinators_part(hosts: int = 1000, ranks: int = 8) -> tuple[int, float, float]:
    """Return a host's bytes, and the seconds to hear all hosts and to see who is absent.

    Each rank is in the default group, in one of its host and in one of its places on all hosts.
    """
    size = hosts * ranks
    state, length, began = judge.Stalls(), 0, time.perf_counter()
    for host in range(hosts):
        told = []
        for local in range(ranks):
            number = host * ranks + local
            is_absent = number == size - 1
            groups = (
                Group(f"0-{size - 1}", 0, "default_pg", 60 + (not is_absent), 61 * (not is_absent)),
                Group(f"{host * ranks}-{host * ranks + ranks - 1}", 0, "mesh_tp", 1000),
                Group(f"{local}-{size - ranks + local}:{ranks}", 0, "mesh_dp", 500),
            )
            place = "train_one_step, train.py:123"
            told.append(StalledRank(number, local, 30.0, "", place, groups))
        report = NoProgressReport(1, tuple(told), others=0)
        length = max(length, len(json.dumps(to_wire(report))))
        state, _ = judge.reported(state, f"algo-{host + 1}", report, (), 100)
    heard = time.perf_counter() - began
    began = time.perf_counter()
    state, _ = judge.time_is_up(state, (), 101)
    assert state.stalls[0].root == (size - 1,)
    return length, heard, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15)
    asked = parser.parse_args()
    runs: dict[int, list[list[float]]] = {0: [], 15: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(asked.pairs):
            for every, found in runs.items():
                found.append(measured(every, asked.seconds, Path(folder)))
    length, heard, seen = coordinators_part()

    import torch

    print(f"{asked.pairs} runs each of {asked.seconds:g} s, {os.cpu_count()} CPUs, ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    print("| looks | all-reduces/s, median | ratio, min | median | max | memory of a rank, MiB |")
    print("|---|---|---|---|---|---|")
    for every, found in runs.items():
        ratios = [one[0] / without[0] for one, without in zip(found, runs[0])]
        speed = statistics.median(one[0] for one in found)
        memory = statistics.median(one[1] for one in found)
        row = [f"{part:.3f}" for part in (min(ratios), statistics.median(ratios), max(ratios))]
        name = f"each {every} s" if every else "none"
        print(f"| {name} | {speed:.0f} | {' | '.join(row)} | {memory:.1f} |")
    moving, waiting = (statistics.median(one[part] for one in runs[15]) for part in (2, 3))
    print(f"\nA look takes a rank {moving:.2f} ms while it moves, ", end="")
    print(f"and {waiting:.0f} ms while it waits.")
    print(f"\n1,000 hosts of 8 ranks, of which nothing moves: {length} bytes from each.")
    print(f"The coordinator hears them in {heard:.2f} s, and sees who is absent in {seen:.2f} s.")


if __name__ == "__main__":
    main()
