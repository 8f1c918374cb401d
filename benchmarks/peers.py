"""What the channel between hosts costs: at the start, and while a job runs.

    python benchmarks/peers.py [--pairs 15] [--hosts 16] [--seconds 30]

Prints a table. The start: two launchers on loopback addresses, from their launch until both have
started their torchrun, with and without the channel in turn. While a job runs: the launcher of
the first of many hosts, whose ranks do nothing. Needs torch and the launcher installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SCRIPT = "import sys, time; sys.stdout.write('runs\\n'); sys.stdout.flush(); time.sleep(3600)"


@contextlib.contextmanager
def launched(hosts: int, port: int, peers: bool, log: Path) -> Iterator[list[Path]]:
    """Launch a job of hosts on loopback addresses; yield the launchers' folders in /proc."""
    names = [f"127.0.0.{number}" for number in range(1, hosts + 1)]
    script = log.parent / "script.py"
    script.write_text(SCRIPT)
    common = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SM_", "PET_", "LAUNCHER_", "SAGEMAKER_"))
    }
    common.update(SM_HOSTS=json.dumps(names), TMPDIR=str(log.parent), SM_NUM_GPUS="0")
    command = [sys.executable, "-m", "launcher", "--launcher-peers", str(peers).lower()]
    command += ["--launcher-rdzv-port", str(port), "--launcher-peer-port", str(port + 1)]
    command += ["--train-script", str(script)]
    with open(log, "wb") as out:
        launchers = [
            subprocess.Popen(
                command, env={**common, "SM_CURRENT_HOST": name}, stdout=out, stderr=out
            )
            for name in names
        ]
    try:
        yield [Path("/proc", str(launcher.pid)) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        for launcher in launchers:
            launcher.wait()


def has_child(proc: Path) -> bool:
    return bool((proc / "task" / proc.name / "children").read_text())


def start(port: int, peers: bool, folder: Path) -> float:
    """Return the ms from the launch of two hosts until both have started torchrun."""
    before = time.monotonic()
    with launched(2, port, peers, folder / "log") as procs:
        while not all(map(has_child, procs)):
            time.sleep(0.002)
        return 1000 * (time.monotonic() - before)


def running(hosts: int, port: int, seconds: int, folder: Path) -> dict[str, float]:
    """Return what the first host's launcher takes while the job runs."""
    log = folder / "log"
    with launched(hosts, port, True, log) as procs:
        while log.read_bytes().count(b"runs\n") < hosts:
            time.sleep(0.5)
        time.sleep(3)

        def seen() -> tuple[float, int, int]:
            ran = int((procs[0] / "schedstat").read_text().split()[0])  # ns, proc(5)
            lines = dict(line.split(":") for line in (procs[0] / "status").read_text().splitlines())
            return ran, int(lines["voluntary_ctxt_switches"]), int(lines["VmHWM"].split()[0])

        ran, switches, _ = seen()
        time.sleep(seconds)
        ran_then, switches_then, peak = seen()
    return {
        "cpu": 100 * (ran_then - ran) / 1e9 / seconds,
        "wakes": (switches_then - switches) / seconds,
        "peak": peak / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=30)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = 20000 + os.getpid() % 4000 * 2
        start(port, True, folder)  # once for the page cache
        pairs = [
            (start(port, True, folder), start(port, False, folder)) for _ in range(chosen.pairs)
        ]
        taken = running(chosen.hosts, port, chosen.seconds, folder)

    print(
        f"{chosen.pairs} pairs, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}\n"
    )
    print("| start of two hosts, launch to both torchruns | unit | min | median | max | bound |")
    print("|---|---|---|---|---|---|")
    for what, values, bound in (
        ("with the channel", [a for a, _ in pairs], ""),
        ("without", [b for _, b in pairs], ""),
        ("what it adds, pair by pair", [a - b for a, b in pairs], "60"),
    ):
        figures = (min(values), statistics.median(values), max(values))
        print(f"| {what} | ms |", " | ".join(f"{v:.0f}" for v in figures), f"| {bound} |")
    print(f"\n| the first of {chosen.hosts} hosts, {chosen.seconds} s of a job | unit | | bound |")
    print("|---|---|---|---|")
    print(f"| CPU of its launcher | % of a core | {taken['cpu']:.4f} | 0.1 |")
    print(f"| its wake-ups | per s | {taken['wakes']:.2f} | 1 |")
    print(f"| its peak memory | MiB | {taken['peak']:.1f} | 26 |")


if __name__ == "__main__":
    main()
