"""Which processes are the job's: those that torchrun and ranks started, and no others."""

import os
import signal

import psutil
import pytest
from conftest import LAUNCHER, ended_by, poll
from network import in_namespaces

pytestmark = pytest.mark.torch

# An entry point that syncs checkpoints beside the training, as with `aws s3 sync`.
WITH_A_LOOP = """\
#!/bin/sh
(while true; do sleep 0.1; done) &
echo $! > loop
exec "$@"
"""
SAVES = """
import signal, sys, time
def stop(number, _):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("runs", flush=True)
time.sleep(600)
"""


@pytest.fixture
def entry_point(script) -> list[str]:
    path = script(WITH_A_LOOP, "entry.sh")
    path.chmod(0o755)
    return [str(path), *LAUNCHER]


def loop_runs() -> bool:
    with open("loop") as file:
        return psutil.Process(int(file.read())).status() != psutil.STATUS_ZOMBIE


def test_a_stop_does_not_wait_for_a_loop_of_the_entry_point(start, script, entry_point):
    options = ("--train-script", script(SAVES), "--launcher-grace", "600")
    host = start(*options, command=entry_point)
    host.wait_for("runs")
    host.signal(signal.SIGTERM)
    assert host.wait(60) == ended_by(signal.SIGTERM), host.log()
    assert "saved\n" in host.out and "left running" not in host.err
    assert loop_runs()


# What a rank starts in the first attempt, and how it may leave that rank before the launcher looks.
LEAVES = """
import os, subprocess, sys

if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    left = open("left").read().split()
    sys.exit(9 if any(os.path.exists("/proc/" + pid) for pid in left) else 0)
twice = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
with open("left", "w") as file:
    for how in ({}, {"start_new_session": True}):
        print(subprocess.Popen(["sleep", "600"], **how).pid, file=file, flush=True)
    # Their parents end first; then only the rank's session tells, or only their environment.
    for how in ({"env": {}}, {"start_new_session": True}):
        subprocess.run([sys.executable, "-c", twice], stdout=file, **how)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("code", "restarts"),
    [(0, 0), (3, 1)],
)
def test_what_ranks_have_started_is_the_jobs(start, script, entry_point, code, restarts):
    """And ends with the attempt; a loop of the entry point is not the job's, and goes on."""
    options = ("--launcher-max-restarts", restarts)
    host = start("--train-script", script(LEAVES), code, *options, command=entry_point)
    assert host.wait() == (0 if restarts else code), host.log()
    with open("left") as file:
        left = [int(pid) for pid in file]
    alive = [pid for pid in left if psutil.pid_exists(pid)]
    for pid in alive:  # one has no environment by which the fixture would find it
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 4 and not alive, host.log()
    assert host.err.count("which rank 0 left running") == 4, host.log()
    assert loop_runs() and os.listdir(host.tmp) == []


HIDDEN = """\
#!/bin/sh
mount -t proc -o hidepid=1 proc /proc
exec setpriv --regid 12345 --clear-groups --bounding-set -sys_ptrace "$@"
"""


@in_namespaces
def test_a_stop_where_proc_hides_the_processes_of_others(start, script):
    """As some clusters mount it. Root without these rights is as blind, but may read our files."""
    path = script("import subprocess; subprocess.Popen(['sleep', '600'])\n" + SAVES)
    hidden = script(HIDDEN, "hidden.sh")
    hidden.chmod(0o755)
    command = ["unshare", "--mount", str(hidden), *LAUNCHER]
    host = start("--train-script", path, "--launcher-grace", "4", command=command)
    host.wait_for("runs")
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert "Traceback" not in host.err
    poll(lambda: host.leftovers() == [])
