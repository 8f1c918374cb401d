"""Warm starts that cannot be: the job starts cold, and one line of the log says why."""

import contextlib
import signal
import sys
from pathlib import Path

import psutil
import pytest
from conftest import completed, poll, slow, words_of

pytestmark = pytest.mark.torch


def nursery_of(host):
    """Return the process that forks the others, and was there before them; None: not yet."""
    found = [one for one in host.children if any("nursery.py" in word for word in words_of(one))]
    return min(found, key=lambda one: one.create_time(), default=None)  # pids start again


def forks_of(process):
    with contextlib.suppress(psutil.Error):  # one has ended
        return process.children()
    return []


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
HOOK = "import sys; sys.meta_path.insert(0, type('Finder', (), {'find_spec': lambda *_: None})())"


@pytest.mark.parametrize(
    ("name", "text", "options", "says"),
    [
        ("odd.py", THREAD, ["odd"], "an import has started a thread (2 are running)"),
        slow("odd.py", "opened = open('odd.log', 'w')", ["odd"], "an import has opened "),
        ("odd.py", PROCESS, ["odd"], "an import has started a process"),
        slow("odd.py", "1 / 0", ["odd"], "importing odd failed with ZeroDivisionError"),
        slow("odd.py", "import os; os.chdir('/')", ["odd"], "an import has changed the current f"),
        slow("odd.py", HANDLER, ["odd"], "an import has set a handler for signal 15"),
        slow("odd.py", THREAD_IN_FORKS, ["odd"], "an import has each fork start a thread"),
        ("queue.py", "", [], "queue is loaded, and would hide the queue in "),
        slow("sitecustomize.py", HOOK, [], "sitecustomize changes how Python imports"),
    ],
)
def test_what_a_fork_cannot_have_starts_cold(start, script, tmp_path, name, text, options, says):
    path = Path(script(TELLS))
    folder = path.parent if name == "queue.py" else tmp_path / "path"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    words = ["--train-script", path, "--launcher-start", "warm"]
    words += [word for one in options for word in ("--launcher-preload", one)]
    host = start(*words, PYTHONPATH="" if name == "queue.py" else str(folder))
    assert host.wait() == 0, host.log()
    assert host.out == "cold\n" and host.err.count(" cold: ") == 1
    assert f"launcher: --launcher-start warm falls back to cold: {says}" in host.err, host.log()
    assert host.leftovers() == []


FOLLOWS_STDERR = """
import logging, sys

class Handler(logging.Handler):  # as one of torch 2.14
    stream = property(lambda self: sys.stderr)

logging.getLogger("own").addHandler(Handler())
"""


def test_a_module_of_the_scripts_own_folder_may_be_preloaded(start, script, tmp_path):
    (tmp_path / "own.py").write_text(FOLLOWS_STDERR)
    path = script("import sys; print('own' in sys.modules, 'torch' in sys.modules, flush=True)")
    words = ["--launcher-start", "warm", "--launcher-preload", "own"]
    host = start("--train-script", path, *words, PYTHONPATH=str(tmp_path))
    assert host.wait() == 0 and host.out == "True True\n", host.log()


CHANGES = """
import os
os.environ["ADDED"] = os.environ["CHANGED"] = "by the import"
os.environ["RANK"] = "by the import"
del os.environ["REMOVED"]
"""


@pytest.mark.systems
def test_an_import_may_change_the_environment(start, script, tmp_path):
    """As it does in a rank that imports it, but not what is the rank's own."""
    (tmp_path / "odd.py").write_text(CHANGES)
    names = ("ADDED", "CHANGED", "REMOVED", "RANK")
    path = script(f"import os; print(*map(os.environ.get, {names}), sep=', ', flush=True)")
    words = ["--launcher-start", "warm", "--launcher-preload", "odd"]
    others = {"CHANGED": "before", "REMOVED": "before", "PYTHONPATH": str(tmp_path)}
    host = start("--train-script", path, *words, **others)
    assert host.wait() == 0, host.log()
    assert host.out == "by the import, by the import, None, 0\n"


def test_another_python_runs_its_ranks_itself(start, script):
    host = start("--train-script", script(TELLS), "--launcher-start", "warm", PYTHON_EXEC="python3")
    assert host.wait() == 0 and host.out == "cold\n", host.log()
    assert "falls back to cold: python3 runs torchrun or the ranks." in host.err


PRINTS = """
import os, sys

how = "warm" if "torch" in sys.modules else "cold"
print(f"{how} rank {os.environ['RANK']}\\n", end="", flush=True)  # in one write: it is tailed
"""


@pytest.mark.systems
@pytest.mark.parametrize("how", ["cold", "warm"])
def test_torchruns_own_options_for_output_hold(start, script, tmp_path, how):
    torchruns = {"PET_LOCAL_RANKS_FILTER": "1", "PET_TEE": "3", "PET_LOG_DIR": str(tmp_path)}
    words = ["--launcher-start", how, "--launcher-nproc-per-node", "2"]
    host = start("--train-script", script(PRINTS), *words, **torchruns)
    assert host.wait() == 0, host.log()
    assert host.out == f"[default1]:{how} rank 1\n"
    written = sorted(path.read_text() for path in tmp_path.rglob("stdout.log"))
    assert written == [f"{how} rank 0\n", f"{how} rank 1\n"]


FAILS_ONCE = f"""{TELLS}
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not os.path.exists("go"):
        time.sleep(0.05)
    raise ValueError("loss is nan")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, slow(signal.SIGINT)])
def test_a_nursery_that_was_killed_is_not_missed_at_a_restart(start, script, number):
    options = ("--launcher-start", "warm", "--launcher-max-restarts", "1")
    host = start("--train-script", script(FAILS_ONCE), *options)
    host.wait_for("warm")
    nursery = nursery_of(host)
    nursery.send_signal(number)
    # It may be killed before it could reply to torchrun, which then tries a cold start in vain.
    poll(lambda: " falls back to cold: " in host.err)
    open("go", "w").close()
    assert host.wait() == 0, host.log()
    assert host.out == "warm\ncold\n", host.log()
    assert host.err.count(" falls back to cold: ") == 1, host.log()
    assert "KeyboardInterrupt" not in host.err
    assert host.leftovers() == []


SUBREAPER = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"


@pytest.mark.parametrize("how", ["cold", "warm"])
def test_ranks_are_the_launchers_though_each_python_is_a_subreaper(start, script, tmp_path, how):
    (tmp_path / "sitecustomize.py").write_text(SUBREAPER)
    path = script("import os; print(os.getppid(), flush=True)")
    host = start("--train-script", path, "--launcher-start", how, PYTHONPATH=str(tmp_path))
    assert host.wait(60) == 0, host.log()
    assert host.out == f"{host.process.pid}\n" and host.leftovers() == []
    assert "falls back to cold" not in host.err  # it changes no imports, though setuptools does


SLOW_FORKS = "import os, time; os.register_at_fork(after_in_child=lambda: time.sleep(2))"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_nursery_killed_and_a_stop_as_torchrun_is_forked(start, script, tmp_path, is_stopped):
    (tmp_path / "slow.py").write_text(SLOW_FORKS)
    words = ["--launcher-start", "warm", "--launcher-preload", "slow"]
    host = start("--train-script", script(TELLS), *words, PYTHONPATH=str(tmp_path))
    nursery = poll(lambda: nursery_of(host), every=0.01)
    # torchrun is forked by a fork of it, and not known for the time of its sleep.
    poll(lambda: any(map(forks_of, forks_of(nursery))), every=0.01)
    if is_stopped:
        host.signal(signal.SIGTERM)
        assert host.wait() == 128 + signal.SIGTERM and "left running" not in host.err, host.log()
    else:
        nursery.kill()
        assert host.wait() == 0 and host.err.count(" falls back to cold: ") == 1, host.log()
    assert "Traceback" not in host.err and host.leftovers() == []


@pytest.mark.systems  # 20 s long it is waited for
def test_a_nursery_that_hangs_as_ranks_start_is_killed(start, script, tmp_path):
    """One line says so, however many ranks there are; an early warning does not kill it."""
    (tmp_path / "slow.py").write_text(SLOW_FORKS)
    words = ["--launcher-start", "warm", "--launcher-preload", "slow"]
    options = ("--launcher-nproc-per-node", "3")
    host = start("--train-script", script(TELLS), *words, *options, PYTHONPATH=str(tmp_path))
    nursery = poll(lambda: nursery_of(host), every=0.01)
    poll(lambda: any(map(forks_of, forks_of(nursery))), every=0.01)
    nursery.send_signal(signal.SIGUSR1)
    nursery.suspend()  # as torchrun is forked, which does not need it before its ranks
    assert host.wait() == 0 and host.out.count("cold") == 3, host.log()
    assert host.err.count("starting ranks cold: the process that forks them has not replied") == 1
    assert host.leftovers() == []


TAKES_AN_ORDER = """
import socket, sys
launcher = socket.socket(fileno=int(sys.argv[-1]))
launcher.sendall(b'{"ready": true}\\n')
launcher.recv(1 << 16)
"""
STARTS = f"""
import os, sys
from launcher.host.signals import Signals
from launcher.host.system import System
from launcher.run.starts import Starts

mark = ("MARK", "of a test")
with Signals() as signals, System(signals) as system:
    starts = Starts(system, print, lambda: print("again"))
    starts.begin_warm([sys.executable, "-c", {TAKES_AN_ORDER!r}], os.environ, mark, "")
    starts.start(["torchrun"], os.environ, mark, tied=False, folder="")
    while not starts.has_more:
        for key, _ in system.selector.select():
            key.data()
    print(starts.has_children)
    starts.go_on()
    print(starts.has_children)
"""


def test_a_torchrun_that_may_have_been_forked_is_reaped():
    """Though what forks it has ended, and the word of its pid is not read."""
    done = completed(sys.executable, "-c", STARTS)
    assert done.stdout == "True\nagain\nFalse\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_as_torch_is_imported_leaves_nothing(start, script, number):
    host = start("--train-script", script(TELLS), "--launcher-start", "warm")
    poll(lambda: host.children, every=0.01)
    host.signal(number)
    host.wait()
    poll(lambda: not host.processes(), timeout=30)
