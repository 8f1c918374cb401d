"""Warm starts: ranks are forks of a process that has imported torch, else a line says why not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, has_ended, poll, slow, words_of

WARM = REPO / "launcher" / "warm"


def warm_of(host):
    """Return the process that forks the others, and was there before them; None: not yet."""
    found = [one for one in host.children if "/warm/warm.py" in " ".join(words_of(one))]
    return min(found, key=lambda one: one.create_time(), default=None)  # pids start again


TELLS = """
import sys

print("warm" if "torch" in sys.modules else "cold", flush=True)
"""
THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
)
PROCESS = "import subprocess; process = subprocess.Popen(['sleep', '99'], start_new_session=True)"
HANDLER = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)"
THREAD_IN_FORKS = f"import os; os.register_at_fork(after_in_child=lambda: exec({THREAD!r}))"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "text", "options", "says"),
    [
        ("odd.py", THREAD, ["odd"], "an import has started a thread ("),
        slow("odd.py", "opened = open('odd.log', 'w')", ["odd"], "an import has opened "),
        slow("odd.py", PROCESS, ["odd"], "an import has started a process"),
        slow("odd.py", "1 / 0", ["odd"], "importing odd failed with ZeroDivisionError"),
        slow("odd.py", "import os; os.chdir('/')", ["odd"], "an import has changed the current f"),
        slow("odd.py", HANDLER, ["odd"], "an import has set a handler for signal 15"),
        slow("odd.py", THREAD_IN_FORKS, ["odd"], "an import has each fork start a thread"),
        ("queue.py", "", [], "queue is loaded, and would hide the queue in "),
    ],
)
def test_what_a_fork_cannot_have_starts_cold(start, script, tmp_path, name, text, options, says):
    folder = tmp_path / "folder"  # not the current one, where torchrun finds a queue.py, too
    folder.mkdir()
    path = script(TELLS, "folder/script.py")
    (folder / name).write_text(text)
    words = ["--train-script", path, "--launcher-start", "warm"]
    words += [word for one in options for word in ("--launcher-preload", one)]
    host = start(*words, PYTHONPATH="" if name == "queue.py" else str(folder))
    host.ends(0)
    assert host.out == "cold\n" and host.err.count(" cold: ") == 1
    assert f"launcher: --launcher-start warm falls back to cold: {says}" in host.err, host.log()


OWN = """
import logging, os, sys

class Handler(logging.Handler):  # as one of torch 2.14
    stream = property(lambda self: sys.stderr)

logging.getLogger("own").addHandler(Handler())
os.environ["ADDED"] = os.environ["CHANGED"] = "by the import"
os.environ["RANK"] = "by the import"
del os.environ["REMOVED"]
"""


@pytest.mark.torch
def test_a_module_of_the_scripts_own_folder_may_be_preloaded(start, script, tmp_path):
    """It changes the environment as in a rank that imports it, but not what is the rank's own."""
    (tmp_path / "own.py").write_text(OWN)
    folders = str(WARM), str(WARM.parent / "run")
    files = [path.stem for folder in folders for path in Path(folder).glob("*.py")]
    names = ("ADDED", "CHANGED", "REMOVED", "RANK")
    path = script(
        "import os, sys; print('own' in sys.modules, 'torch' in sys.modules)\n"
        f"print(sys.modules.keys() & {{*{files}}} or {{*{folders}}}.intersection(sys.path))\n"
        f"print(*map(os.environ.get, {names}), sep=', ')"
    )
    words = ["--launcher-start", "warm", "--launcher-preload", "own"]
    others = {"CHANGED": "before", "REMOVED": "before", "PYTHONPATH": str(tmp_path)}
    host = start("--train-script", path, *words, **others)
    assert host.wait() == 0, host.log()
    assert host.out == "True True\nset()\nby the import, by the import, None, 0\n"


def two_ranks_after(script, preload):
    """Return the words of a warm start of two ranks that imports a module first."""
    words = ("--launcher-start", "warm", "--launcher-preload", preload)
    return ("--train-script", script(TELLS), *words, "--launcher-nproc-per-node", "2")


WAITS = """
import os, time

while not os.path.exists("go"):
    time.sleep(0.05)
"""


@pytest.mark.torch
@pytest.mark.parametrize("number", [signal.SIGKILL, slow(signal.SIGINT)])
def test_it_is_killed_while_it_imports(start, script, tmp_path, number):
    """The stubs that wait for it start their keepers themselves."""
    (tmp_path / "slow.py").write_text(WAITS)
    host = start(*two_ranks_after(script, "slow"), PYTHONPATH=str(tmp_path))
    poll(lambda: len(host.stubs) == 2)
    warm_of(host).send_signal(number)
    host.ends(0)
    assert host.out == "cold\ncold\n", host.log()
    line = "falls back to cold: the process that forks the ranks has ended.\n"
    assert host.err.count(line) == 1 and "KeyboardInterrupt" not in host.err


HOLDS_AFTER_A_KEEPER = """
import os, time

forks, pid = 0, os.getpid()

def count():
    global forks
    forks += 1

def hold():
    while forks == 2 and os.getpid() == pid:  # the first fork only looks whether forks can be
        open("forked", "w").close()
        time.sleep(0.05)

os.register_at_fork(before=count, after_in_parent=hold)
"""


@pytest.mark.torch
def test_it_is_killed_as_it_forks(start, script, tmp_path):
    """Its fork does not need it; the other stub starts its keeper itself."""
    (tmp_path / "holds.py").write_text(HOLDS_AFTER_A_KEEPER)
    host = start(*two_ranks_after(script, "holds"), PYTHONPATH=str(tmp_path))
    poll(lambda: os.path.exists("forked"))
    host.wait_for("warm\n")
    warm_of(host).kill()
    host.ends(0)
    assert sorted(host.out.split()) == ["cold", "warm"], host.log()
    assert host.err.count(" falls back to cold: ") == 1


@pytest.mark.torch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_ends_while_it_imports(start, script, tmp_path, number):
    """And stubs wait for it: nothing is left, and nobody is waited for."""
    (tmp_path / "slow.py").write_text(WAITS)
    host = start(*two_ranks_after(script, "slow"), PYTHONPATH=str(tmp_path))
    poll(lambda: len(host.stubs) == 2)
    host.signal(number)
    assert host.wait() == 128 + number and "left running" not in host.err, host.log()
    poll(lambda: not host.processes(), timeout=60)


STUBBORN = """
import signal, subprocess, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.torch
@pytest.mark.parametrize("how", [slow("cold"), "warm"])
def test_what_a_killed_keeper_leaves_is_ended(start, script, how):
    words = ("--launcher-start", how, "--launcher-failure-grace", "1")
    host = start("--train-script", script(STUBBORN), *words)
    host.wait_for("up")
    (keeper,) = host.keepers
    left = keeper.children(recursive=True)
    assert len(left) == 2
    keeper.kill()
    host.ends(69)
    assert "was killed" in host.failure, host.log()
    assert all(has_ended(one.pid) for one in left)


# What a stub hands over, and to whom; no torch.

FOLDERS = f"sys.path[:0] = {[str(WARM.parent / 'run'), str(WARM)]}"
STUB = f"""
import os, sys
{FOLDERS}
import stub
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
stub._SECONDS = float(sys.argv[1])
told = stub.have_forked("warm")
print("cold" if told < 0 else os.read(told, 1)[0])
"""
LISTENS = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("warm")
listener.listen()
print(flush=True)
"""
WAITS_FOR_EVER = "sys.stdin.read()"
FORKS = f"""
{FOLDERS}
import warm
connection = listener.accept()[0]
words, environ, tells = warm.as_stub(connection)
print(words, environ["OF_STUB"], os.sched_getaffinity(0), flush=True)
os.write(tells, bytes([7]))
"""


def started(text, *words, **options):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, text, *words], **pipes, **options)


def test_a_stub_without_a_reply_kills_who_listens_and_starts_its_keeper_itself(script):
    stub = "-I", "-S", script(STUB, "starts.py")
    with started(script(LISTENS + WAITS_FOR_EVER, "listens.py")) as listens:
        listens.stdout.readline()
        with started(*stub, "0.2") as stub_of_it:
            assert stub_of_it.communicate()[0] == "cold\n"
        assert listens.wait(60) == -signal.SIGKILL
    with started(*stub, "60") as stub_of_none:  # nobody listens there any more
        assert stub_of_none.communicate()[0] == "cold\n"


def test_a_fork_has_what_the_stub_has(script):
    with started(script(LISTENS + FORKS, "forks.py")) as forks:
        forks.stdout.readline()
        environ = {**os.environ, "OF_STUB": "a=b\n"}
        with started("-I", "-S", script(STUB, "starts.py"), "60", "", "é", env=environ) as stub:
            out = stub.communicate()[0]
        assert forks.wait(60) == 0
    cores = {min(os.sched_getaffinity(0))}
    assert out == f"['60', '', 'é'] a=b\n {cores}\n7\n"
