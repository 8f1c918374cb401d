"""Stops while the driver of the devices hangs, as a broken one has been seen to do."""

import os
import signal

import pytest
from conftest import LAUNCHER, ended_by, poll, ports

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
    assert host.wait(60) == ended_by(signal.SIGTERM), host.log()
    assert "assuming" not in host.err and "CPU" not in host.err
    assert host.failure is None and host.leftovers() == []


@pytest.mark.torch
def test_a_stop_of_a_host_whose_driver_hangs_stops_the_others(start, script, hanging):
    variables, wait = hanging
    hosts = ("127.0.0.1", "127.0.0.2")
    common = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', **ports()}
    path = script("")
    first = start(
        "--train-script", path, host=hosts[0], SM_CURRENT_HOST=hosts[0], **common, SM_NUM_GPUS="0"
    )
    second = start(
        "--train-script", path, host=hosts[1], SM_CURRENT_HOST=hosts[1], **common, **variables
    )
    wait()
    poll(lambda: "rendezvous at" in first.err)  # it has 3 s to hear of the stop
    second.signal(signal.SIGTERM)
    for host in (second, first):
        assert host.wait(60) == ended_by(signal.SIGTERM), host.log()
        assert host.failure is None and host.leftovers() == []


def test_a_stop_of_local_while_the_driver_hangs(start, script, hanging):
    variables, wait = hanging
    command = [*LAUNCHER, "local", "--hosts", "2", "--", str(script(""))]
    host = start(command=command, **variables)
    wait()
    host.signal(signal.SIGINT)
    assert host.wait(60) == ended_by(signal.SIGINT), host.log()
    assert host.leftovers() == []
