"""What a restart costs: from a rank's failure until the script runs again, launcher and torchrun.

    python benchmarks/restart.py [--pairs 5]

One host of two ranks, of which one fails once; both in turn, so that a machine whose speed drifts
does not favour either. The launchers start a new torchrun, which imports torch again. There are no
collectives: torchrun's own restart may fail with them. Needs torch and the launcher installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FAILS_ONCE = """
import os, sys, time
import torch
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        time.sleep(600)
    with open(sys.argv[1], "w") as file:
        print(time.time(), file=file)
    os._exit(3)
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "a") as file:
        print(time.time(), file=file)
"""


def seconds(argv: list[str], environment: dict[str, str], stamp: Path) -> float:
    """Run a job; return the time from its failure to the restarted script, which has torch."""
    done = subprocess.run(argv, env=environment, stderr=subprocess.DEVNULL, timeout=300)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(argv)} failed with {done.returncode}")
    failed, again = map(float, stamp.read_text().split())
    return again - failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        script, stamp = Path(folder, "fails.py"), Path(folder, "stamp")
        script.write_text(FAILS_ONCE)
        others = ("SM_", "PET_", "LAUNCHER_", "SAGEMAKER_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        environment.update(OMP_NUM_THREADS="1", TMPDIR=folder)
        options = ["--launcher-nproc-per-node", "2", "--launcher-max-restarts", "1"]
        words = [*options, "--train-script", str(script), str(stamp)]
        launcher = [sys.executable, "-m", "launcher", *words]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        torchrun += ["--standalone", "--max-restarts", "1", "--", str(script), str(stamp)]
        for command in (launcher, torchrun):  # once for the page cache
            seconds(command, environment, stamp)
        for _ in range(pairs):
            ours.append(seconds(launcher, environment, stamp))
            theirs.append(seconds(torchrun, environment, stamp))
    python = platform.python_version()
    print(f"{pairs} pairs, {os.cpu_count()} CPUs, Python {python}, {time.strftime('%Y-%m-%d')}\n")
    print("| from the failure to the script again | unit | min | median | max |")
    print("|---|---|---|---|---|")
    more = [a - b for a, b in zip(ours, theirs)]
    for what, values in (("launcher", ours), ("torchrun", theirs), ("the difference", more)):
        figures = (min(values), statistics.median(values), max(values))
        print(f"| {what} | s |", " | ".join(f"{value:.2f}" for value in figures), "|")


if __name__ == "__main__":
    main()
