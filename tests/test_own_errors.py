"""Errors of the launcher itself end the job in order: with 70, on all hosts, and with a reason."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LAUNCHER, ports

MISTAKEN = [sys.executable, str(Path(__file__).parent / "failing_launcher.py")]
SAVES = """
import os, signal, sys, time

def save(*_):
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
GONE = """
import os

if os.environ["SM_CURRENT_HOST"] == "127.0.0.2" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.rename(os.environ["OWN_TMP"], os.environ["OWN_TMP"] + "-gone")
    raise ValueError("loss is nan")
"""


@pytest.mark.torch
@pytest.mark.parametrize("how_often", ["once", "always"])
def test_a_mistake_of_ours_ends_the_ranks_with_their_grace_and_says_why(start, script, how_often):
    host = start("--train-script", script(SAVES), command=[*MISTAKEN, how_often])
    assert host.wait() == 70, host.log()
    reason = "launcher: localhost: the launcher itself failed with KeyError: 'a mistake'\n"
    assert host.failure.startswith(reason), host.log()
    assert "launcher: Traceback (most recent call last):" in host.err
    assert host.out.count("saved") == host.out.count("ready") and host.leftovers() == []


@pytest.mark.torch
def test_a_launcher_that_sees_no_processes_does_not_wait_for_ever(start, script):
    options = ("--launcher-grace", "1", "--launcher-failure-grace", "1")
    host = start("--train-script", script("print(1)"), *options, command=[*MISTAKEN, "look"])
    assert host.wait(30) == 0, host.log()  # as was known before
    assert "launcher: IndexError: no processes" in host.err and host.leftovers() == []


@pytest.mark.torch
@pytest.mark.parametrize("how_often", ["once", "always"])
@pytest.mark.parametrize("which", [0, 1])
def test_all_hosts_say_it(start, script, how_often, which):
    names = ["127.0.0.1", "127.0.0.2"]
    common = {
        "SM_HOSTS": json.dumps(names),
        "SM_NUM_GPUS": "0",
        "TRAINING_JOB_NAME": "j",
        **ports(),
    }
    words = ("--train-script", script(SAVES))
    commands = [LAUNCHER, LAUNCHER]
    commands[which] = [*MISTAKEN, how_often]
    hosts = [
        start(*words, host=name, command=command, SM_CURRENT_HOST=name, **common)
        for name, command in zip(names, commands)
    ]
    assert [host.wait() for host in hosts] == [70, 70], "".join(host.log() for host in hosts)
    reason = f"launcher: {names[which]}: the launcher itself failed with KeyError: 'a mistake'\n"
    assert hosts[0].failure == hosts[1].failure and hosts[0].failure.startswith(reason)
    for host in hosts:
        assert host.out.count("saved") == host.out.count("ready"), host.log()


@pytest.mark.torch
def test_a_folder_that_is_gone_at_a_restart(start_two, script):
    own = Path(os.environ["TMPDIR"]) / "t"
    own.mkdir()
    script = script(GONE)
    options = ("--launcher-max-restarts", "1")
    hosts = start_two("--train-script", script, *options, OWN_TMP=str(own), TMPDIR=str(own))
    assert [host.wait() for host in hosts] == [70, 70], "".join(host.log() for host in hosts)
    assert hosts[0].failure == hosts[1].failure
    assert f"cannot make a folder in {own} (No such file or directory)" in hosts[0].failure


@pytest.mark.parametrize("files", [8, 14, 25])
def test_too_few_descriptors_are_said_before_anything_starts(script, files):
    words = (*LAUNCHER, "--train-script", str(script("print('ran')")))
    command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    says = f"this process may have {files} files open (ulimit -n), but torchrun needs 26; raise"
    assert done.returncode == 2 and says in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "ran" not in done.stdout
