"""What the channel between hosts costs: at the start, and while a job runs.

    python benchmarks/peers.py [--starts 15] [--hosts 16] [--seconds 30] [--many 1000]

Prints a table. The start: two launchers on loopback addresses, from their launch until both have
started their torchrun. While a job runs: the launcher of
the first of 16 hosts, whose ranks do nothing. At scale: a launcher as the first of 1,000 hosts, of
which this process plays the others, who all connect at once; with and without `ulimit -n 1024`.
Needs torch and the launcher installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.job.prepare import prepare
from launcher.peers.messages import Hello, hello, to_wire
from launcher.text.protocol import encoded

SCRIPT = "import sys, time; sys.stdout.write('runs\\n'); sys.stdout.flush(); time.sleep(3600)"


def job_of(names: list[str], port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's arguments and environment for a job, but SM_CURRENT_HOST."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    common = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SM_", "PET_", "LAUNCHER_", "SAGEMAKER_"))
    }
    common.update(SM_HOSTS=json.dumps(names), TMPDIR=str(folder), SM_NUM_GPUS="0")
    arguments = ["--launcher-rdzv-port", str(port), "--launcher-peer-port", str(port + 1)]
    return [*arguments, "--train-script", str(script)], common


@contextlib.contextmanager
def launched(hosts: int, port: int, log: Path) -> Iterator[list[Path]]:
    """Launch a job of hosts on loopback addresses; yield the launchers' folders in /proc."""
    names = [f"127.0.0.{number}" for number in range(1, hosts + 1)]
    arguments, common = job_of(names, port, log.parent)
    command = [sys.executable, "-m", "launcher", *arguments]
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


def status(proc: Path) -> dict[str, str]:
    return dict(line.split(":") for line in (proc / "status").read_text().splitlines())


def has_child(proc: Path) -> bool:
    return bool((proc / "task" / proc.name / "children").read_text())


def start(port: int, folder: Path) -> float:
    """Return the ms from the launch of two hosts until both have started torchrun."""
    before = time.monotonic()
    with launched(2, port, folder / "log") as procs:
        while not all(map(has_child, procs)):
            time.sleep(0.002)
        return 1000 * (time.monotonic() - before)


def running(hosts: int, port: int, seconds: int, folder: Path) -> dict[str, float]:
    """Return what the first host's launcher takes while the job runs."""
    log = folder / "log"
    with launched(hosts, port, log) as procs:
        while log.read_bytes().count(b"runs\n") < hosts:
            time.sleep(0.5)
        time.sleep(3)

        def seen() -> tuple[float, int, int]:
            ran = int((procs[0] / "schedstat").read_text().split()[0])  # ns, proc(5)
            lines = status(procs[0])
            return ran, int(lines["voluntary_ctxt_switches"]), int(lines["VmHWM"].split()[0])

        ran, switches, _ = seen()
        time.sleep(seconds)
        ran_then, switches_then, peak = seen()
    return {
        "cpu": 100 * (ran_then - ran) / 1e9 / seconds,
        "wakes": (switches_then - switches) / seconds,
        "peak": peak / 1024,
    }


class Crowd:
    """All hosts but the first, who connect at once: sockets that say hello and wait to start."""

    def __init__(self, hosts: list[str], address: tuple[str, int], said: Hello) -> None:
        self._address = address
        self._said = said
        self._selector = selectors.EpollSelector()
        self.connected = self.welcome = self.joined = 0.0  # when the last one was
        self.waiting = len(hosts)
        self._started: list[socket.socket] = []
        for host in hosts:
            self._connect(host)

    def _connect(self, host: str) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(self._address)
        self._selector.register(connection, selectors.EVENT_WRITE, host)

    def wait(self) -> None:
        """Wait until all have heard that they can start."""
        while self.waiting:
            for key, events in self._selector.select(20) or sys.exit("hosts are left waiting"):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                now = time.monotonic()
                if events & selectors.EVENT_WRITE:
                    self.connected = now
                    connection.sendall(encoded(to_wire(self._said._replace(host=key.data))))
                    self._selector.modify(connection, selectors.EVENT_READ, key.data)
                    continue
                said = connection.recv(1 << 16)
                if b'"Welcome"' in said:
                    self.welcome = now
                if b'"Start"' in said:
                    self.joined = now
                    self.waiting -= 1
                    self._selector.unregister(connection)
                    self._started.append(connection)  # it stays connected
                elif b'"Welcome"' not in said:
                    self._selector.unregister(connection)
                    connection.close()
                    if b'"Later"' not in said:
                        sys.exit(f"{key.data} was turned away: {said!r}")
                    self._connect(key.data)


def crowd(hosts: int, port: int, limit: int, folder: Path) -> dict[str, float]:
    """Return how a launcher does whose others all come at once: s since the last connection."""
    names = ["127.0.0.1", *(f"algo-{number:04}" for number in range(1, hosts))]
    arguments, common = job_of(names, port, folder)
    prepared = prepare(arguments, {**common, "SM_CURRENT_HOST": names[-1]})
    assert prepared and not prepared.error
    with open(folder / "log", "wb") as out:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "launcher", *arguments],
            env={**common, "SM_CURRENT_HOST": names[0]},
            stdout=out,
            stderr=out,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        )
    try:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((names[0], port + 1)).close()
                break
            if launcher.poll() is not None:
                sys.exit((folder / "log").read_text())
        said = hello(prepared)
        others = Crowd(names[1:], (names[0], port + 1), said)
        others.wait()
        while not has_child(Path("/proc", str(launcher.pid))):
            time.sleep(0.01)
        peak = int(status(Path("/proc", str(launcher.pid)))["VmHWM"].split()[0]) / 1024
        return {
            "welcome": others.welcome - others.connected,
            "joined": others.joined - others.connected,
            "peak": peak,
        }
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=15)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--many", type=int, default=1000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = 20000 + os.getpid() % 4000 * 2
        start(port, folder)  # once for the page cache
        starts = [start(port, folder) for _ in range(chosen.starts)]
        taken = running(chosen.hosts, port, chosen.seconds, folder)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        crowds = {limit: crowd(chosen.many, port, limit, folder) for limit in (most, 1024)}

    print(
        f"{chosen.starts} starts, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}\n"
    )
    figures = (min(starts), statistics.median(starts), max(starts))
    print("| | unit | min | median | max |")
    print("|---|---|---|---|---|")
    shown = " | ".join(f"{value:.0f}" for value in figures)
    print(f"| start of two hosts, launch to both torchruns | ms | {shown} |")
    print(f"\n| the first of {chosen.hosts} hosts, {chosen.seconds} s of a job | unit | | bound |")
    print("|---|---|---|---|")
    print(f"| CPU of its launcher | % of a core | {taken['cpu']:.4f} | 0.1 |")
    print(f"| its wake-ups | per s | {taken['wakes']:.2f} | 1 |")
    print(f"| its peak memory | MiB | {taken['peak']:.1f} | 30 |")
    for limit, seen in crowds.items():
        print(f"\n| the first of {chosen.many} hosts at once, ulimit -n {limit} | unit | | bound |")
        print("|---|---|---|---|")
        print(f"| last connection to last welcome | s | {seen['welcome']:.3f} | 2 |")
        print(f"| last connection to the start | s | {seen['joined']:.3f} | 2 |")
        print(f"| peak memory of its launcher | MiB | {seen['peak']:.1f} | 64 |")


if __name__ == "__main__":
    main()
