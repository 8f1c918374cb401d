"""Stops while the driver of the devices hangs, as a broken one has been seen to do."""

import signal

import pytest
from conftest import LAUNCHER, ended_by, poll

HANGS = """
trap '' TERM INT
touch {ready}
sleep 600 &
while true; do wait; done
"""


@pytest.fixture
def hanging(tmp_path, program):
    """Make a driver that hangs; return the variables with which it is asked, and a wait for it."""
    ready = tmp_path / "asked"
    return program("nvidia-smi", HANGS.format(ready=ready)), lambda: poll(ready.exists)


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
