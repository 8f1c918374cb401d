"""Errors of the launcher itself end the job in order: with 70, on all hosts, and with a reason."""

import sys
from pathlib import Path

import pytest
from conftest import LAUNCHER, SAVES, TWO_HOSTS, completed, of_two_hosts, poll

MISTAKEN = [sys.executable, str(Path(__file__).parent / "failing_launcher.py")]
# What a thread raises is an event at which the mistake can happen while ranks run.
RAISES = "import threading\nthreading.Thread(target=int, args=('x',)).start()\n"
RAISES_AND_SAVES = SAVES.replace("time.sleep", f"{RAISES}time.sleep")
NO_THREADS = """
import sys, threading
from launcher.cli import main

def start(self):
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
sys.exit(main())
"""


def all_say_it(start, script, what, which):
    """Run two hosts, one with a mistake of ours; see that both say so, and return them."""
    names, common = TWO_HOSTS, of_two_hosts()
    commands = [LAUNCHER, LAUNCHER]
    commands[which] = [*MISTAKEN, what]
    hosts = [None, None]
    for number in (1 - which, which):
        own = {"host": names[number], "command": commands[number], "SM_CURRENT_HOST": names[number]}
        hosts[number] = start("--train-script", script, **own, **common)
        # The host with the mistake, which starts last, tells the other for 3 s.
        poll(lambda: "rendezvous at" in hosts[1 - which].err)
    assert [host.wait() for host in hosts] == [70, 70], "".join(host.log() for host in hosts)
    reason = f"launcher: {names[which]}: the launcher itself failed with KeyError: 'a mistake'\n"
    assert hosts[0].failure == hosts[1].failure and hosts[0].failure.startswith(reason)
    assert "launcher: Traceback (most recent call last):" in hosts[which].err
    return hosts


@pytest.mark.parametrize(("what", "which"), [("plan", 1), ("begin", 0)])
def test_a_mistake_of_ours_before_the_hosts_have_joined_is_told_to_all(start, script, what, which):
    for host in all_say_it(start, script("print('ran')"), what, which):
        assert "ran" not in host.out


@pytest.mark.torch
@pytest.mark.parametrize(("how_often", "which"), [("once", 1), ("always", 0)])
def test_a_mistake_of_ours_ends_all_hosts_with_their_grace_and_one_reason(
    start, script, how_often, which
):
    for host in all_say_it(start, script(RAISES_AND_SAVES), how_often, which):
        # A rank may be told before it prints that it runs.
        assert host.out.count("saved") >= host.out.count("runs"), host.log()
        assert host.leftovers() == []


UPLOADS = """
import pathlib, signal, sys, time
def finish(*_):
    time.sleep(1)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, finish)
print("uploads", flush=True)
time.sleep(1000)
"""
LEAVES_AN_UPLOAD = f"""
import subprocess, sys
upload = subprocess.Popen([sys.executable, "-c", {UPLOADS!r}, sys.argv[1]], stdout=subprocess.PIPE)
upload.stdout.readline()
"""


@pytest.mark.torch
def test_a_mistake_of_ours_leaves_an_upload_its_grace(start, script, tmp_path):
    words = ("--train-script", script(LEAVES_AN_UPLOAD), tmp_path / "uploaded")
    host = start(*words, command=[*MISTAKEN, "success"])
    host.ends(0)
    assert (tmp_path / "uploaded").exists() and "KeyError: 'a mistake'" in host.err


@pytest.mark.torch
def test_what_a_person_can_fix_before_the_start_is_no_mistake_of_ours(start, script):
    common, words = of_two_hosts(), ("--train-script", script("print('ran')"))
    commands = {"127.0.0.1": LAUNCHER, "127.0.0.2": [sys.executable, "-c", NO_THREADS]}
    says = "launcher: 127.0.0.2: cannot start a thread (can't start new thread); raise ulimit -u.\n"
    hosts = [
        start(*words, host=name, command=command, **common, SM_CURRENT_HOST=name)
        for name, command in commands.items()
    ]
    for host in hosts:
        assert host.wait() == 2, host.log()
        assert host.failure == says and "Traceback" not in host.err


def test_too_few_descriptors_are_said_before_anything_starts(script, monkeypatch):
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    options = ("--launcher-dry-run", "--train-script", str(script("")))
    done = completed("sh", "-c", 'ulimit -n 25; exec "$@"', "sh", *LAUNCHER, *options, code=2)
    says = "this process may have 25 files open (ulimit -n), but needs 26; raise that limit."
    assert done.stderr == f"launcher: {says}\n"
