"""A stop that saves: what hears it, what is left alone, and what else may happen meanwhile."""

import contextlib
import os
import shutil
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from conftest import (
    completed,
    ended_by,
    poll,
    words_of,
)

pytestmark = pytest.mark.torch

TWO_RANKS = ("--launcher-nproc-per-node", "2")

WORKERS = """
import itertools, signal, sys
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    loaders = [
        DataLoader(Numbers(), num_workers=1, multiprocessing_context=how, persistent_workers=stay)
        for how, stay in (("fork", False), ("forkserver", True))
    ]
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    epochs = [itertools.chain.from_iterable(itertools.repeat(loader)) for loader in loaders]
    for step in itertools.count():
        seen = [next(epoch) for epoch in epochs]
        if step == 2:
            print("runs", flush=True)
        if heard:
            break
    for _ in range(9):  # into the epoch that follows
        seen = [next(epoch) for epoch in epochs]
    print("saved after", len(heard), flush=True)
    sys.exit(143)
"""


def test_data_loaders_workers_go_on_while_their_rank_saves(start, script):
    host = start("--train-script", script(WORKERS))
    host.wait_for("runs")
    assert "torch" not in Path(f"/proc/{host.process.pid}/maps").read_text()  # nor ever imported
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert "saved after 1\n" in host.out, host.log()
    assert host.failure is None
    # Such folders of multiprocessing stay behind under plain Python, too.
    assert [left for left in host.leftovers() if not left.startswith("pymp-")] == []


UPLOAD = """
import os, signal, subprocess, sys, time
def stop(number, _):
    command = "import os, time\\nwhile not os.path.exists('go'): time.sleep(0.05)"
    command += "\\nprint('uploaded', flush=True)"
    subprocess.Popen([sys.executable, "-c", command])
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
signal.signal(signal.SIGTERM, stop)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("runs", flush=True)
time.sleep(1000)
"""


def test_what_a_rank_leaves_at_a_stop_has_the_rest_of_the_grace(start, script):
    host = start("--train-script", script(UPLOAD), "--launcher-grace", "12")
    host.wait_for("runs")
    waiting = [psutil.Process(host.process.pid), *host.keepers]
    host.signal(signal.SIGTERM)
    poll(lambda: "left running by rank 0; any that remain" in host.err)
    slept = [one.num_ctx_switches().voluntary for one in waiting]
    open("go", "w").close()
    host.wait_for("uploaded")
    more = list(slept)

    def daemon_is_ended() -> bool:
        with contextlib.suppress(psutil.Error):  # they have ended since
            more[:] = [one.num_ctx_switches().voluntary for one in waiting]
        return "which rank 0 left running" in host.err

    poll(daemon_is_ended)
    # They wait, and look again only when something ends.
    assert all(now - before < 100 for now, before in zip(more, slept))
    assert host.wait(60) == ended_by(signal.SIGTERM), host.log()
    assert host.out == "runs\nuploaded\n", host.log()
    assert host.err.count("which rank 0 left running") == 1
    assert host.leftovers() == []


MANY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(1000)
"""


def test_ranks_that_start_in_the_moment_of_a_stop_hear_it(start, script):
    options = ("--launcher-nproc-per-node", "8", "--launcher-grace", "40")
    host = start("--train-script", script(MANY), *options)
    poll(lambda: len(host.stubs) >= 3, every=0.001)
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert "left running" not in host.err and "killing it" not in host.err, host.log()
    assert host.leftovers() == []


EARLY = """
import os, runpy, signal, sys

class AtImport:
    def find_spec(self, name, *_):
        if name == "launcher.cli":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, AtImport())
runpy.run_module("launcher", run_name="__main__", alter_sys=True)
"""


def test_a_stop_while_the_launcher_itself_starts_is_a_stop(script):
    command = (sys.executable, script(EARLY, "early.py"), "--train-script", script(""))
    done = completed(*command, code=128 + signal.SIGTERM)
    assert "stopped by SIGTERM (signal 15)" in done.stderr


def test_a_launcher_that_is_killed_as_torchrun_starts_leaves_nothing(start, script):
    host = start("--train-script", script("import time; time.sleep(1000)"))
    poll(lambda: psutil.Process(host.process.pid).children(), every=0.001)
    host.process.kill()
    poll(lambda: not host.processes())


SLOW = "import os, time; time.sleep(3 * ('RANK' in os.environ))"


def test_a_stop_as_ranks_take_long_to_start_says_nothing_false(start, script, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    words = ("--train-script", script(MANY), *TWO_RANKS)
    host = start(*words, PYTHONPATH=str(tmp_path))
    poll(lambda: any("rank.py" in " ".join(words_of(one)) for one in host.processes()), every=0.05)
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert "left running" not in host.err and "killing it" not in host.err, host.log()
    assert host.leftovers() == []


IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("runs", flush=True)
time.sleep(1000)
"""
RUNS_ANOTHER = "import subprocess\nprint('runs', flush=True)\nsubprocess.call(['sleep', '1000'])\n"


def test_a_torchrun_that_gets_a_stop_of_its_own_ends_the_job(start, script):
    options = (*TWO_RANKS, "--launcher-failure-grace", "1", "--launcher-grace", "1")
    host = start("--train-script", script(IGNORES), *options)
    host.wait_for("runs", 2)
    host.torchrun.terminate()
    assert host.wait() == 69, host.log()
    assert ": its process below torchrun was killed\n" in host.failure
    assert host.leftovers() == []


def test_nothing_of_a_killed_launchers_job_runs_on(start, script):
    """Nor what a rank waits for."""
    host = start("--train-script", script(RUNS_ANOTHER), "--launcher-grace", "2", *TWO_RANKS)
    host.wait_for("runs", 2)
    host.process.kill()
    poll(lambda: not host.processes())


REPLACED = """
import os, signal, sys, time
if os.environ["RANK"] == "0" and "PYTHONHASHSEED" not in os.environ:
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.argv])
if os.environ["RANK"] != "2":
    os.closerange(3, 256)
heard = []
signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
os.write(1, b"runs\\n")
while not heard:
    time.sleep(0.01)
time.sleep(0.5)  # it saves
os.write(1, b"saved after %d\\n" % len(heard))
"""


def test_a_rank_without_its_connection_is_still_a_rank(start, script):
    """Nor is a stop heard twice if somebody has removed the job's folder."""
    options = ("--launcher-nproc-per-node", "3")
    host = start("--train-script", script(REPLACED), *options)
    host.wait_for("runs", 3)
    (folder,) = (name for name in os.listdir(host.tmp) if name.startswith("sm-launch-"))
    shutil.rmtree(os.path.join(host.tmp, folder))
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert host.out.count("saved after 1\n") == 3, host.log()
    assert host.leftovers() == []


WRAPPED = """
import os, signal, sys, time
heard = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: heard.append(number))
os.write(1, b"runs\\n")  # at once: ranks share the file
while not heard:
    time.sleep(0.01)
time.sleep(0.5)  # it saves
os.write(1, b"saved after %d\\n" % len(heard))
"""


def test_what_a_rank_only_started_hears_the_stop(start, script):
    """As Ctrl-C does a program that os.system() waits for, which ignores it itself meanwhile."""
    script(WRAPPED, "wrapped.py")
    path = script("import os, sys; sys.exit(os.system(sys.executable + ' wrapped.py') >> 8)")
    host = start("--train-script", path, *TWO_RANKS)
    host.wait_for("runs", 2)
    host.signal(signal.SIGINT)
    assert host.wait() == ended_by(signal.SIGINT), host.log()
    assert host.out.count("saved after 1") == 2, host.log()
    assert host.leftovers() == []


# What is no stop

WARNED = """
import os, signal, sys, time
kinds = (signal.SIGALRM, signal.SIGPWR, signal.SIGRTMIN + 3, signal.SIGUSR1, signal.SIGUSR2)
odd = [int(kind) for kind in kinds if signal.getsignal(kind) != signal.SIG_DFL]
blocked = [int(kind) for kind in signal.pthread_sigmask(0, ())]
os.write(1, f"begins with {odd} {blocked}\\n".encode())  # at once: ranks share the file
if os.environ["RANK"] in os.environ["WARNED"]:
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"warned\\n"))
    signal.signal(signal.SIGALRM, lambda *_: print("alarmed", flush=True))
print("runs", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def test_what_is_no_stop_ends_nothing_and_reaches_no_rank(start, script):
    options = ("--launcher-nproc-per-node", "3")
    host = start("--train-script", script(WARNED), *options, WARNED="0 1")
    host.wait_for("runs", 3)
    assert host.out.count("begins with [] []") == 3
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
    numbers += (signal.SIGXCPU, signal.SIGIO, signal.SIGPWR, signal.SIGRTMIN + 3)
    for number in numbers:
        for _ in range(2):
            host.signal(number)
            poll(lambda number=number: f"signal {int(number)}" in host.err)
    open("go", "w").close()
    assert host.wait() == 0, host.log()
    line = (
        "launcher: SIGUSR1 (signal 10): ignored; it is not a stop signal, and is not forwarded "
        "to the ranks.\n"
    )
    assert host.err.count(line) == 1, host.log()
    assert host.err.count("it is not a stop signal") == len(numbers), host.log()
    assert "warned" not in host.out and "alarmed" not in host.out, host.log()


# Pairs of events (docs/development/hosts.md has the table)

FAIL_AND_SAVE = """
import os, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
open("armed-" + os.environ["RANK"], "w").close()
if os.environ["RANK"] == "1":
    while not os.path.exists("armed-0"):
        time.sleep(0.01)
    sys.exit(7)
while not heard:
    time.sleep(0.01)
print("heard", flush=True)
while not os.path.exists("stopped"):
    time.sleep(0.01)
print("saved after", len(heard), flush=True)
"""


def test_a_stop_while_ranks_are_restarted(start, script):
    options = (*TWO_RANKS, "--launcher-max-restarts", "3")
    host = start("--train-script", script(FAIL_AND_SAVE), *options)
    host.wait_for("heard")
    host.signal(signal.SIGTERM)
    poll(lambda: "have 100 s to save" in host.err)
    open("stopped", "w").close()
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert "saved after 1" in host.out, host.log()
    assert host.failure is None
    assert host.leftovers() == []


SAVE = """
import os, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
print("runs", flush=True)
while not heard:
    time.sleep(0.01)
print("heard", flush=True)
while not os.path.exists("lost"):
    time.sleep(0.01)
time.sleep(1)
print("saved after", len(heard), flush=True)
"""


def test_a_host_lost_during_a_stop_does_not_disturb_it(start_two, script):
    hosts = start_two("--train-script", script(SAVE))
    for host in hosts:
        host.wait_for("runs")
    hosts[1].signal(signal.SIGTERM)
    for host in hosts:
        host.wait_for("heard")
    lost, left = hosts
    for process in lost.processes():
        process.kill()
    open("lost", "w").close()
    assert left.wait() == ended_by(signal.SIGTERM), left.log()
    assert "saved after 1" in left.out, left.log()
    assert left.failure is None
    assert left.leftovers() == []


# Restarts


def test_a_job_that_has_succeeded_does_not_wait_to_say_so(start, script):
    text = """
        import os, time
        print("runs", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.05)
    """
    host = start("--train-script", script(textwrap.dedent(text)))
    host.wait_for("runs")
    (keeper,), (rank,) = host.keepers, host.ranks
    host.signal(signal.SIGSTOP)  # it may be as slow as it likes to hear what the keeper says
    open("go", "w").close()
    # The keeper has said so, and waits again.
    poll(lambda: not rank.is_running() and keeper.status() == psutil.STATUS_SLEEPING)
    host.signal(signal.SIGTERM)
    host.signal(signal.SIGCONT)
    assert host.wait() == 0, host.log()
    assert "Traceback" not in host.err
