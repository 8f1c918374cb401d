"""Which processes are the job's: those that torchrun and ranks started, and no others."""

import signal

import pytest
from conftest import LAUNCHER, SAVES, ended_by, poll
from network import in_namespaces

pytestmark = pytest.mark.torch
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
