"""Which processes are the job's: those that torchrun and ranks started, and no others."""

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
