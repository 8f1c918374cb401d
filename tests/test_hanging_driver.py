"""Stops while the driver of the devices hangs, as a broken one has been seen to do."""

import os
import signal

import pytest
from conftest import LAUNCHER, ended_by, poll

HANGS = """#!/bin/sh
trap '' TERM INT
touch {ready}
sleep 600 &
while true; do wait; done
"""


@pytest.fixture
def hanging(tmp_path):
    """Make a driver that hangs; return the variables with which it is asked, and a wait for it."""
    driver, ready = tmp_path / "driver" / "nvidia-smi", tmp_path / "asked"
    driver.parent.mkdir()
    driver.write_text(HANGS.format(ready=ready))
    driver.chmod(0o755)
    path = f"{driver.parent}:{os.environ['PATH']}"
    return {"PATH": path}, lambda: poll(ready.exists)


def test_a_stop_ends_the_wait_for_the_driver(start, script, hanging):
    variables, wait = hanging
    host = start("--train-script", script(""), **variables)
    wait()
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert "assuming" not in host.err and "CPU" not in host.err
    assert host.failure is None and host.leftovers() == []


def test_a_stop_of_local_while_the_driver_hangs(start, script, hanging):
    variables, wait = hanging
    command = [*LAUNCHER, "local", "--hosts", "2", "--", str(script(""))]
    host = start(command=command, **variables)
    wait()
    host.signal(signal.SIGINT)
    assert host.wait() == ended_by(signal.SIGINT), host.log()
    assert host.leftovers() == []
