"""What the launcher itself costs: its own CPU time and peak memory, installed and as one file.

And what a rank's stub and keeper cost together, whose script prints nothing.

    python benchmarks/overhead.py [--pairs 9]

Prints a table of them, for a job of two ranks that do an all-reduce; both (`make bundle`) in turn
so that a machine whose speed drifts does not favour either. How soon ranks start, and how that
compares with torchrun, is in beside.py. Needs torch and the launcher installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from launcher.job.plan import STUB

BUILD = Path(__file__).resolve().parent.parent / "bundle" / "build.py"
ALL_REDUCE = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os._exit(0)  # the end is not what is measured, and torch 2.4 can deadlock in it
"""


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process alone (Linux, proc(5), schedstat in ns)."""
    return int(Path("/proc", str(pid), "schedstat").read_text().split()[0]) / 1e9


def cpu_of_python(environment: dict[str, str]) -> float:
    """Return the CPU seconds that Python takes to start and do nothing: this machine's speed."""
    process = subprocess.Popen([sys.executable, "-c", "pass"], env=environment)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    cpu = cpu_of(process.pid)
    process.wait()
    return cpu


def run(argv: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command to its end; return its own CPU s and peak MiB.

    "Own" leaves out its children: CPU is read when it has ended but is not reaped, memory while
    it runs (VmHWM).
    """
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)
    proc = Path("/proc", str(process.pid))
    peak = 0
    wnowait = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while os.waitid(os.P_PID, process.pid, wnowait) is None:
        for line in (proc / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                peak = int(line.split()[1])
        time.sleep(0.05)
    cpu = cpu_of(process.pid)
    if process.wait() != 0:
        sys.exit(f"{shlex.join(argv)} failed with {process.returncode}")
    return {"cpu": cpu, "peak": peak / 1024}


def run_keeper(folder: str, environment: dict[str, str]) -> dict[str, float]:
    """Start a stub and its keeper for a script; return the CPU s and PSS MiB of both."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    names |= {"GROUP_RANK": "0", "LAUNCHER_RUN_DIR": folder}
    script = Path(folder, "sleep.py")
    script.write_text("import time; time.sleep(0.5)")
    start = {"environ": {}, "grace": 30.0, "ignored": [], "log": ""}
    start |= {"shows": True, "prefix": "", "merges": False, "bars": ""}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        argv = [sys.executable, "-I", "-S", STUB, "script", str(script)]
        stub = subprocess.Popen(argv, env={**environment, **names}, stdout=subprocess.DEVNULL)
        connection = listener.accept()[0]
    os.unlink(f"{folder}/socket")
    with connection, connection.makefile("rwb", 0) as keeper:
        keeper.readline()
        pids = stub.pid, psutil.Process(stub.pid).children()[0].pid
        keeper.write(json.dumps({"run": start}).encode() + b"\n")
        keeper.readline()
        memory = sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
        while b'{"ended"' not in keeper.readline():
            pass
        cpu = sum(map(cpu_of, pids))
        keeper.write(b'{"leave": 0}\n')
        stub.wait()
    return {"cpu": cpu, "memory": memory / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    pairs = parser.parse_args().pairs

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "reduce.py")
        script.write_text(ALL_REDUCE)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SM_", "PET_", "LAUNCHER_", "SAGEMAKER_"))
        }
        environment["OMP_NUM_THREADS"] = "1"
        environment["TMPDIR"] = folder  # torchrun leaves its log folders behind
        one_file = Path(folder, "launcher.py")
        subprocess.run([sys.executable, BUILD, one_file], check=True)
        words = ["--launcher-nproc-per-node", "2", "--train-script", str(script)]
        launcher = [sys.executable, "-m", "launcher", *words]
        bundled = [sys.executable, str(one_file), *words]
        for command in (launcher, bundled):  # once for the page cache
            run(command, environment)
        ours, files, python, keepers = [], [], [], []
        for _ in range(pairs):
            keepers.append(run_keeper(folder, environment))
            ours.append(run(launcher, environment))
            files.append(run(bundled, environment))
            python.append(cpu_of_python(environment))

    more = [1000 * (a["cpu"] - b["cpu"]) for a, b in zip(files, ours)]
    rows = [
        ("launcher's own CPU time", "ms", [1000 * a["cpu"] for a in ours], "100"),
        ("of that, the start of Python itself", "ms", [1000 * cpu for cpu in python], ""),
        ("launcher's own peak memory", "MiB", [a["peak"] for a in ours], "30"),
        ("a stub's and its keeper's CPU time", "ms", [1000 * a["cpu"] for a in keepers], "20"),
        ("a stub's and its keeper's memory (PSS)", "MiB", [a["memory"] for a in keepers], "12"),
        ("one file: its own CPU time", "ms", [1000 * a["cpu"] for a in files], "150"),
        ("of that, over the installed one, pair by pair", "ms", more, ""),
        ("one file: its own peak memory", "MiB", [a["peak"] for a in files], "30"),
    ]
    from launcher.job.resources import torch_folder, torch_version

    print(
        f"{pairs} pairs, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch_version(torch_folder())}, {time.strftime('%Y-%m-%d')}\n"
    )
    print("| what | unit | min | median | max | bound |")
    print("|---|---|---|---|---|---|")
    for what, unit, values, bound in rows:
        figures = (min(values), statistics.median(values), max(values))
        print(f"| {what} | {unit} |", " | ".join(f"{v:.3f}" for v in figures), f"| {bound} |")


if __name__ == "__main__":
    main()
