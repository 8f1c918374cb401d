"""Stops of a real launcher that come early, and signals that are no stops; test_run.py has others.

What keepers do at a stop is in test_keeper.py; what befalls a job meanwhile, in simulated ones.
"""

import signal
import sys

import psutil
import pytest
from conftest import LAUNCHER, SAVES, completed, ended_by, has_ended, poll, words_of
from network import in_namespaces

pytestmark = pytest.mark.torch
SLOW = "import os, time; time.sleep(3 * ('RANK' in os.environ))"


@pytest.mark.parametrize(
    ("moment", "number"),
    [("torchrun starts ranks", signal.SIGHUP), ("ranks start Python", signal.SIGINT)],
)
def test_a_stop_while_ranks_start_says_nothing_false(start, script, tmp_path, moment, number):
    options = ("--launcher-nproc-per-node", "8", "--launcher-grace", "40")
    environ = {}
    if moment == "ranks start Python":
        script(SLOW, "sitecustomize.py")
        environ = {"PYTHONPATH": str(tmp_path)}
    host = start("--train-script", script(SAVES), *options, **environ)

    def is_now() -> bool:
        if moment == "torchrun starts ranks":
            return len(host.stubs) >= 3
        return any("rank.py" in " ".join(words_of(one)) for one in host.processes())

    poll(is_now, every=0.001)
    host.signal(number)
    host.ends(ended_by(number))
    assert "left running" not in host.err and "killing it" not in host.err, host.log()


SAVES_AND_SUCCEEDS = SAVES.replace("143", "0")


@pytest.mark.parametrize("moment", ["torchrun starts", "ranks run", "ranks end before their stubs"])
def test_a_stop_of_all_processes_is_one_even_if_their_ends_are_seen_with_it(start, script, moment):
    """A launcher that was suspended sees all at once: that torchrun was killed, that ranks end."""
    host = start("--train-script", script(SAVES_AND_SUCCEEDS))
    runs = moment != "torchrun starts"
    if runs:
        host.wait_for("runs")
        ends = host.ranks
    else:
        poll(lambda: "torch.distributed.run" in " ".join(map(str, map(words_of, host.children))))
        ends = [host.torchrun]
    launcher = psutil.Process(host.process.pid)
    late = [host.torchrun, *host.stubs] if "before" in moment else []
    below = [one for one in launcher.children(recursive=True) if one not in late]
    launcher.suspend()
    for process in (launcher, *below):
        process.send_signal(signal.SIGTERM)
    poll(lambda: all(has_ended(one.pid) for one in ends))
    launcher.resume()
    host.ends(ended_by(signal.SIGTERM))
    assert host.out.count("saved") == runs, host.log()


EARLY = """
import os, runpy, signal, sys

class AtImport:
    def find_spec(self, name, *_):
        if name == "launcher.cli":
            os.kill(os.getpid(), int(sys.argv.pop()))

sys.meta_path.insert(0, AtImport())
runpy.run_module("launcher", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_stop_while_the_launcher_itself_starts_is_a_stop(script, number):
    words = ("--train-script", script(""), int(number))
    done = completed(sys.executable, script(EARLY, "early.py"), *words, code=ended_by(number))
    assert f"stopped by {number.name} (signal {int(number)})" in done.stderr


def test_a_launcher_that_is_killed_as_torchrun_starts_leaves_nothing(start, script):
    host = start("--train-script", script("import time; time.sleep(1000)"))
    poll(lambda: psutil.Process(host.process.pid).children(), every=0.001)
    host.process.kill()
    poll(lambda: not host.processes())


WARNED = """
import os, signal, time
for number in (signal.SIGUSR1, signal.SIGALRM):
    signal.signal(number, lambda *_: print("warned", flush=True))
print("runs", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def test_what_is_no_stop_ends_nothing_and_reaches_no_rank(start, script):
    host = start("--train-script", script(WARNED))
    host.wait_for("runs")
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
    numbers += (signal.SIGXCPU, signal.SIGIO, signal.SIGPWR, signal.SIGRTMIN + 3)
    for number in numbers:
        for _ in range(2):
            host.signal(number)
            poll(lambda number=number: f"signal {int(number)}" in host.err)
    open("go", "w").close()
    host.ends(0)
    line = (
        "launcher: SIGUSR1 (signal 10): ignored; it is not a stop signal, and is not forwarded "
        "to the ranks.\n"
    )
    assert host.err.count(line) == 1, host.log()
    assert host.err.count("it is not a stop signal") == len(numbers), host.log()
    assert "warned" not in host.out, host.log()


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
