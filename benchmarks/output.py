"""What --launcher-log-dir costs: jobs with it and without, in turn, in one run.

    python benchmarks/output.py               # five rounds: 8 minutes
    python benchmarks/output.py --rounds 1 --figure idle lines

Each round tries all ways once, in an order that moves on by one; prints medians, and those of the
ratios to the way without it of the same round. This process reads what the launcher prints, as fast
as it comes. What is measured, without torch in the ranks:

- idle: 8 ranks that sleep 5 s: from start to end, and CPU seconds of all processes.
- lines, bars: one rank writes 200 MB of lines, or 20 MB of states of a bar, 64 KiB at a time: MB/s
  in the rank, and until the launcher has ended.
- prints: one rank calls print() 200,000 times: microseconds each.
- stop: from SIGTERM to the end of a launcher whose rank writes 200 MB/s and ends at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SM_LAUNCH = Path(sys.executable).parent / "sm-launch"
WAYS = {
    "without": (),
    "log-dir": ("--launcher-log-dir", "logs"),
    "and prefix": ("--launcher-log-dir", "logs", "--launcher-log-prefix", "true"),
}
FIGURES = ("idle", "lines", "bars", "prints", "stop")
SCRIPT = """
import os, signal, sys, time

figure = sys.argv[1]
begun = time.monotonic()
line = b"x" * 99 + b"\\n" if figure != "bars" else b"\\r" + b"x" * 99
block = line * 655
size = {"lines": 200_000_000, "bars": 20_000_000}.get(figure, 0)
if figure == "idle":
    time.sleep(5)
if figure == "stop":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    open("ready", "w").close()
    while True:
        began = time.monotonic()
        for _ in range(20):
            os.write(1, block)
        time.sleep(max(0.0, 20 * len(block) / 2e8 - (time.monotonic() - began)))
if figure == "prints":
    for number in range(200_000):
        print("step", number, "loss 1.234567 lr 0.0001")
written = 0
while written < size:
    written += os.write(1, block)
with open("took", "w") as file:
    file.write(repr(time.monotonic() - begun))
"""


def run(figure: str, options: tuple[str, ...]) -> dict[str, float]:
    """Run one job; return what was measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        nproc = "8" if figure == "idle" else "1"
        words = [SM_LAUNCH, *options, "--launcher-nproc-per-node", nproc]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LAUNCHER_", "PET_"))}
        before, began = cpu(), time.monotonic()
        process = subprocess.Popen(
            [*words, "--train-script", "script.py", figure],
            cwd=folder,
            env={**clean, "SM_OUTPUT_DIR": name, "TMPDIR": name, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        reader = threading.Thread(target=read, args=(process,))
        reader.start()
        if figure == "stop":
            while not (folder / "ready").exists():
                time.sleep(0.01)
            time.sleep(3)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
        process.wait()
        seconds = time.monotonic() - began
        reader.join()
        if figure == "stop":
            return {"stop, s": seconds}
        took = float((folder / "took").read_text())
    if figure == "idle":
        return {"idle, start to end, s": seconds, "idle, CPU, s": cpu() - before}
    if figure == "prints":
        return {"print(), us": took / 0.2}
    size = {"lines": 200, "bars": 20}[figure]
    return {f"{figure}, MB/s": size / took, f"{figure}, start to end, s": seconds}


def read(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout
    while os.read(process.stdout.fileno(), 1 << 20):
        pass


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--write", type=Path, help="write all values there, as JSON")
    asked = parser.parse_args()
    values: dict[str, dict[str, list[float]]] = {}
    load, ways = os.getloadavg()[0], list(WAYS)
    for number in range(asked.rounds):
        first = number % len(ways)
        for figure in asked.figure:
            for way in ways[first:] + ways[:first]:
                for name, value in run(figure, WAYS[way]).items():
                    values.setdefault(name, {}).setdefault(way, []).append(value)
                    line = f"round {number + 1}: {way}: {name} {value:.3g}"
                    print(line, file=sys.stderr, flush=True)
    if asked.write:
        asked.write.write_text(json.dumps(values, indent=1) + "\n")
    print(f"{asked.rounds} rounds, {os.cpu_count()} CPUs, load before {load:.1f}\n")
    print(f"| median (ratio of the same round) | {' | '.join(WAYS)} |")
    print("|---" * (len(WAYS) + 1) + "|")
    for name, by_way in values.items():
        cells = []
        for way in WAYS:
            ratios = [one / base for one, base in zip(by_way[way], by_way["without"])]
            cells.append(f"{statistics.median(by_way[way]):.3g} ({statistics.median(ratios):.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
