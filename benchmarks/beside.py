"""The launcher beside torchrun and all others: starts, stops, failures, restarts, CPU and memory.

    python benchmarks/beside.py                             # all of it, five rounds: an hour
    python benchmarks/beside.py --figure start-1x2 stop --of torchrun sm-launch --rounds 1
    python benchmarks/beside.py --read runs/beside.json     # the table again, without a run

Each round tries all ways once, in an order that moves on by one from round to round, so that a
machine whose speed drifts favours none; ratios are those of the same round. Prints a table, and
writes what was found to runs/beside.json (--write).

Needs Linux, root (or user namespaces), iproute2, util-linux, torch, the launcher, and what `make
bench` installs for the others; a way that is not installed is left out, with a line. The benchmark
runs itself again in namespaces, with a network and process ids of its own: no port is taken, and
no process is left behind whatever ends it.

What is measured:

- start: from the start of the first host's launcher until the last rank's first all-reduce has
  ended (gloo); and at that moment the CPU seconds and the PSS of all processes of the job.
- whole: the same job, from the start of its first host's launcher until all launchers have ended.
- stop: from SIGTERM to the launcher until the last rank's handler runs.
- failure: two hosts; from an exception on the second one until the launchers of both have ended.
  The other ranks are in no collective, or in one.
- restart: from a rank's exit until all ranks of the next attempt have imported torch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import figures
import psutil
import ways
from figures import FAILED, FIGURES, NEVER, Found, Value

SCRIPT = """
import os, signal, sys, time
import torch
imported = time.monotonic()
import torch.distributed as dist

case, folder, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
world = range(int(os.environ["WORLD_SIZE"]))
local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
fails = os.environ["BESIDE_HOST"] == "last" and local == size - 1
path_of = lambda what, rank: os.path.join(folder, f"{what}-{rank}")

def note(what, when):
    with open(path_of(what, rank) + ".new", "w") as file:
        file.write(repr(when))
    os.rename(path_of(what, rank) + ".new", path_of(what, rank))

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.002)

if case == "restart":  # without collectives, with which torchrun's own restart may fail
    if any(os.path.exists(path_of("failed", other)) for other in world):
        note("again", imported)
        os._exit(0)
    note("ready", imported)
    if fails:
        for other in world:
            wait_for(path_of("ready", other))
        note("failed", time.monotonic())
        os._exit(3)
    time.sleep(600)

if case == "stop":
    signal.signal(signal.SIGTERM, lambda *_: note("heard", time.monotonic()))
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
note("reduced", time.monotonic())
if case == "whole":
    dist.destroy_process_group()
    sys.exit()
now = os.path.join(folder, "now")
while case == "failure-collective" and not (fails and os.path.exists(now)):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.002)
if case != "stop" and fails:
    wait_for(now)
    note("failed", time.monotonic())
    raise ValueError("loss is nan")
while True:
    time.sleep(600)
"""
LONGEST_START = 180.0  # seconds, for 16 ranks and 8 launchers on two cores that have other work
OTHERS = ("SM_", "PET_", "LAUNCHER_", "SAGEMAKER_", "ACCELERATE_", "TORCHELASTIC_", "SLURM_")
PORTS = itertools.cycle(range(20000, 29000, 2))


class Failed(Exception):
    """A job did not get as far as it has to for a figure; says why."""


class Running:
    """A job's hosts while they run; afterwards none of its processes does."""

    def __init__(self, way: str, figure: str, folder: Path, patience: float):
        asked = FIGURES[figure]
        case = figure.partition("-1x")[0]
        self._case = case if case.startswith(("failure", "restart", "whole")) else "stop"
        self._way, self._folder, self._patience = way, folder, patience
        self._all = range(asked.hosts * asked.ranks)
        script = folder / "script.py"
        script.write_text(SCRIPT)
        hosts = tuple(f"127.0.0.{number + 2}" for number in range(asked.hosts))
        arguments, restarts = (self._case, str(folder)), int(figure == "restart")
        self.job = ways.Job(
            hosts, asked.ranks, restarts, str(script), arguments, folder, next(PORTS)
        )
        self._launchers: list[subprocess.Popen[bytes]] = []
        self.began = 0.0

    def __enter__(self) -> Running:
        commands = []
        for host in self.job.hosts:
            commands.append(ways.WAYS[self._way](self.job, host))
        common = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
        common.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
        common.update(TMPDIR=str(self._folder), HOME=str(self._folder))
        common["PATH"] = f"{ways.BIN}:{common['PATH']}"
        self.began = time.monotonic()
        with open(self._folder / "log", "wb") as log:
            for words, variables in commands:
                place = "last" if len(self._launchers) == len(commands) - 1 else "other"
                self._launchers.append(
                    subprocess.Popen(
                        words,
                        env={**common, **variables, "BESIDE_HOST": place},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End and reap all that the job started: this process adopts what is left alone.

        A process whose other threads are still ending is a zombie that cannot be reaped yet, and
        would be counted with the next job.
        """
        deadline = time.monotonic() + 30
        while left := descendants():
            if time.monotonic() > deadline:
                sys.exit(f"these processes do not end: {left}")
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            for launcher in self._launchers:
                launcher.poll()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.02)

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-1500:]

    def noted(self, what: str, wanted: int, seconds: float, alive: bool = True) -> list[float]:
        """Return when ranks noted that, once as many have; or [] after so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            # Before the look at the files: ranks may note it, and all end, in between.
            have_ended = alive and all(launcher.poll() is not None for launcher in self._launchers)
            paths = [self._folder / f"{what}-{rank}" for rank in self._all]
            found = [path for path in paths if path.exists()]
            if len(found) >= wanted:
                return [float(path.read_text()) for path in found]
            if have_ended:
                return []
            time.sleep(0.005)
        return []

    def started(self, what: str = "reduced") -> float:
        """Wait until all ranks noted that; return how long it took."""
        when = self.noted(what, len(self._all), LONGEST_START)
        if not when:
            raise Failed(f"not all ranks got there: {self.log()}")
        return max(when) - self.began

    def stop(self) -> Value:
        """Return the milliseconds until all ranks' handlers have run."""
        sent = time.monotonic()
        for launcher in self._launchers:
            launcher.send_signal(signal.SIGTERM)
        heard = self.noted("heard", len(self._all), self._patience, alive=False)
        return 1000 * (max(heard) - sent) if heard else NEVER

    def fail(self) -> Value:
        """Have a rank of the last host fail; return the seconds until no launcher is left."""
        (self._folder / "now").touch()
        failed = self.noted("failed", 1, self._patience)
        if not failed:
            raise Failed(f"no rank failed: {self.log()}")
        return self.ends(failed[0])

    def ends(self, since: float) -> Value:
        """Return the seconds until no launcher is left."""
        while time.monotonic() < since + self._patience:
            if all(launcher.poll() is not None for launcher in self._launchers):
                return time.monotonic() - since
            time.sleep(0.002)
        return NEVER

    def restart(self) -> Value:
        """Return the seconds from the failure until all ranks have torch again."""
        self.started("ready")
        again = self.noted("again", len(self._all), LONGEST_START, alive=False)
        return max(again) - self.noted("failed", 1, 0.1, alive=False)[0] if again else NEVER


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def cpu_of_all() -> float:
    """Return the CPU seconds of all processes of the job so far, with those that were reaped."""
    return sum(sum(one.cpu_times()[:4]) for one in descendants())


def memory_of_all() -> float:
    """Return their memory in MiB, what they share counted once."""
    return sum(one.memory_full_info().pss for one in descendants()) / 2**20


def measured(way: str, figure: str, wanted: list[str], patience: float) -> dict[str, Value]:
    """Run one job; return the figures that it yields."""
    with tempfile.TemporaryDirectory() as name:
        try:
            with Running(way, figure, Path(name), patience) as running:
                if figure == "restart":
                    return {figure: running.restart()}
                found: dict[str, Value] = {figure: running.started()}
                if figure.startswith("failure"):
                    return {figure: running.fail()}
                if figure.startswith("whole"):
                    return {figure: running.ends(running.began)}
                if "cpu" in wanted:
                    found["cpu"] = cpu_of_all()
                if "memory" in wanted:
                    found["memory"] = memory_of_all()
                if "stop" in wanted:
                    found["stop"] = running.stop()
                return found
        except Failed as error:
            print(f"{way}, {figure}: {error}", file=sys.stderr)
            return dict.fromkeys([figure, *wanted], FAILED)


def jobs_for(chosen: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Return the jobs that have to run, each with what else is measured in it."""
    beside = {"start-1x8": ["cpu", "memory"], "start-1x2": ["stop"]}
    for figure in FIGURES:
        also = [other for other in beside.get(figure, ()) if other in chosen]
        if also or (figure in chosen and not any(figure in others for others in beside.values())):
            yield figure, also


def run(chosen: list[str], of: list[str], rounds: int, patience: float) -> Found:
    """Try all ways in each round, in an order that moves on by one from round to round."""
    values: dict[str, dict[str, list[Value]]] = {
        figure: {way: [] for way in of} for figure in FIGURES if figure in chosen
    }
    load = os.getloadavg()[0]
    if any("0.7" in way for way in of):
        ways.mount_for_the_debian()
    for way in of if rounds > 1 else ():  # once for the page cache
        measured(way, "start-1x2", [], patience)
    for number, (figure, also) in itertools.product(range(rounds), list(jobs_for(chosen))):
        first = number % len(of)
        for way in of[first:] + of[:first]:
            ranks = FIGURES[figure].hosts * FIGURES[figure].ranks
            wanted = [one for one in (figure, *also) if one in chosen]
            found: dict[str, Value] = dict.fromkeys(wanted)
            # What never came twice is not waited for again; "stop" is beside a figure that is.
            if values[wanted[0]][way].count(NEVER) < 2 and ways.starts(way, ranks):
                found.update(measured(way, figure, also, patience))
            for one in wanted:
                values[one][way].append(found[one])
            said = ", ".join(f"{one} {found[one]}" for one in wanted)
            print(f"round {number + 1}: {way}: {said}", file=sys.stderr, flush=True)
    return Found(about(rounds, load, patience), patience, values)


def about(rounds: int, load: float, patience: float) -> tuple[str, ...]:
    """Return what the numbers depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(": ")[2] for line in lines if line.startswith("model name")}
    machine = [f"{os.cpu_count()} CPUs ({', '.join(models)})", f"Linux {platform.release()}"]
    machine += [f"load before {load:.1f}", f"Python {platform.python_version()}"]
    machine += [f"never: not within {patience:g} s"]
    rounds_of = f"{rounds} rounds" if rounds != 1 else "1 round"
    return (
        ", ".join([rounds_of, time.strftime("%Y-%m-%d"), *machine]),
        ", ".join(ways.versions()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--figure", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--of", nargs="+", choices=ways.WAYS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=40, help="seconds until it is never")
    parser.add_argument("--write", type=Path, default=ways.REPO / "runs" / "beside.json")
    parser.add_argument("--read", type=Path, help="a file that --write wrote: no run")
    parser.add_argument("--in-namespaces", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        found = figures.from_json(json.loads(asked.read.read_text()))
    else:
        why_not = {way: ways.missing(way) for way in asked.of or ways.WAYS}
        for way, why in why_not.items():
            if why and asked.of:
                parser.error(f"{way}: {why}")
            if why and not asked.in_namespaces:
                print(f"without {way}: {why}", file=sys.stderr)
        if not asked.in_namespaces:
            in_namespaces()
        found = run(
            asked.figure, [way for way in why_not if not why_not[way]], asked.rounds, asked.patience
        )
        asked.write.parent.mkdir(parents=True, exist_ok=True)
        asked.write.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    print("\n".join((*found.about, "", *figures.table(found))))


def in_namespaces() -> NoReturn:
    """Run this again as process 1 of a network and of process ids of its own; no return.

    unshare ignores SIGTERM and SIGINT, but takes all with it when it is killed: as it is when this
    process ends, in whatever way.
    """
    unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child"]
    unshare += ["--net", "--pid", "--mount-proc"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    up = ["sh", "-c", 'ip link set lo up && exec "$0" "$@"', sys.executable]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        again = [*unshare, *up, *sys.argv, "--in-namespaces"]
        done = subprocess.run(again, env={**os.environ, "TMPDIR": folder})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
