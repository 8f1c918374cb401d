"""Warm starts that cannot be: the job starts cold, and one line of the log says why."""

import signal
from pathlib import Path

import pytest
from conftest import poll, slow

pytestmark = pytest.mark.torch

TELLS = """
import sys

print("warm" if "torch" in sys.modules else "cold", flush=True)
"""
THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
)
HOOK = "import sys; sys.meta_path.insert(0, type('Finder', (), {'find_spec': lambda *_: None})())"


@pytest.mark.parametrize(
    ("name", "text", "options", "says"),
    [
        ("odd.py", THREAD, ["odd"], "an import has started a thread (there are 2)"),
        slow("odd.py", "opened = open('odd.log', 'w')", ["odd"], "an import has opened "),
        slow("odd.py", "1 / 0", ["odd"], "importing odd failed with ZeroDivisionError"),
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
    assert host.out == "cold\n" and host.err.count("starting cold") == 1
    assert f"launcher: --launcher-start warm: starting cold, as {says}" in host.err, host.log()
    assert host.leftovers() == []


def test_another_python_runs_its_ranks_itself(start, script):
    host = start("--train-script", script(TELLS), "--launcher-start", "warm", PYTHON_EXEC="python3")
    assert host.wait() == 0 and host.out == "cold\n", host.log()
    assert "starting cold, as python3 is to run torchrun or ranks." in host.err


FAILS_ONCE = f"""{TELLS}
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not os.path.exists("go"):
        time.sleep(0.05)
    raise ValueError("loss is nan")
"""


def test_a_nursery_that_was_killed_is_not_missed_at_a_restart(start, script):
    options = ("--launcher-start", "warm", "--launcher-max-restarts", "1")
    host = start("--train-script", script(FAILS_ONCE), *options)
    host.wait_for("warm")
    nursery = min(host.children, key=lambda one: one.pid)  # it was there before what it forks
    nursery.kill()
    poll(lambda: "starting cold" in host.err)
    open("go", "w").close()
    assert host.wait() == 0, host.log()
    assert host.out == "warm\ncold\n" and host.err.count("starting cold") == 1
    assert host.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_as_torch_is_imported_leaves_nothing(start, script, number):
    host = start("--train-script", script(TELLS), "--launcher-start", "warm")
    poll(lambda: host.children, every=0.01)
    host.signal(number)
    host.wait()
    poll(lambda: not host.processes(), timeout=30)
