"""Stops while the driver of the devices hangs, as a broken one has been seen to do."""

import signal

import pytest
from conftest import ended_by, poll

HANGS = """
trap '' TERM INT
touch {ready}
sleep 600 &
while true; do wait; done
"""


@pytest.mark.parametrize(
    ("words", "number"),
    [(["--train-script"], signal.SIGTERM), (["local", "--hosts", "2", "--"], signal.SIGINT)],
)
def test_a_stop_ends_the_wait_for_the_driver(start, script, tmp_path, program, words, number):
    ready = tmp_path / "asked"
    environ = program("nvidia-smi", HANGS.format(ready=ready))
    # For so long a launcher waits for what it has started, and here that is nothing.
    host = start(*words, script(""), LAUNCHER_FAILURE_GRACE="1000", **environ)
    poll(ready.exists)
    host.signal(number)
    host.ends(ended_by(number))
    assert "assuming" not in host.err and "CPU" not in host.err
