"""Which processes are the job's: those that torchrun and ranks started, and no others."""

import os
import signal
import textwrap

import psutil
import pytest
from conftest import LAUNCHER, ended_by, poll

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


@pytest.mark.parametrize("code", [0, 3])
def test_a_loop_of_the_entry_point_is_not_the_jobs(start, script, entry_point, code):
    host = start("--train-script", script(f"raise SystemExit({code})"), command=entry_point)
    assert host.wait() == code, host.log()
    assert "which the job left behind" not in host.err and "SIGKILL" not in host.err
    assert loop_runs()


def test_a_stop_does_not_wait_for_a_loop_of_the_entry_point(start, script, entry_point):
    options = ("--train-script", script(SAVES), "--launcher-grace", "600")
    host = start(*options, command=entry_point)
    host.wait_for("runs")
    host.signal(signal.SIGTERM)
    assert host.wait(60) == ended_by(signal.SIGTERM), host.log()
    assert "saved\n" in host.out and "left behind" not in host.err
    assert loop_runs()


# How a process may leave the rank that started it, before the launcher looks for the first time.
LEAVES = {
    "a session of its own": "start_new_session=True",
    "an emptied environment": "env={}",
}


@pytest.mark.parametrize("how", LEAVES.values(), ids=LEAVES)
def test_what_has_left_its_rank_is_the_jobs(start, script, how):
    path = script(
        f"""
        import subprocess, sys
        twice = "import subprocess; subprocess.Popen(['sleep', '600']); print('started')"
        subprocess.run([sys.executable, "-c", twice], {how})
        """
    )
    path.write_text(textwrap.dedent(path.read_text()))
    host = start("--train-script", path)
    assert host.wait() == 0, host.log()
    assert "started\n" in host.out and "which the job left behind" in host.err
    assert host.leftovers() == []


LEAVES_AND_FAILS_ONCE = """
import os, subprocess, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    twice = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    with open("left", "w") as file:
        subprocess.run([sys.executable, "-c", twice], env={}, stdout=file)
    sys.exit(9)
"""


def test_what_has_left_a_rank_of_the_last_attempt_is_the_jobs(start, script):
    """With an emptied environment: only the session of its rank, which has ended, tells."""
    options = ("--train-script", script(LEAVES_AND_FAILS_ONCE), "--launcher-max-restarts", "1")
    host = start(*options)
    assert host.wait() == 0, host.log()
    with open("left") as file:
        pid = int(file.read())
    ended = not psutil.pid_exists(pid)
    if not ended:
        os.kill(pid, signal.SIGKILL)  # it has no environment by which the test would find it
    assert ended, host.log()
    assert f"ending process {pid}, which the last attempt left behind" in host.err


HIDDEN = """\
#!/bin/sh
mount -t proc -o hidepid=1 proc /proc
exec setpriv --regid 12345 --clear-groups --bounding-set -sys_ptrace "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
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
