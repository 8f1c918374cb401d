"""Nothing is said of a job that moves, however its ranks share the work."""

from pathlib import Path

import pytest
from conftest import more, slow

SCRIPT = Path(__file__).with_name("moving.py")
pytestmark = [pytest.mark.torch]


@pytest.mark.parametrize("argument", [slow("recorded"), more("counted")])
def test_nothing_is_said_of_a_job_that_moves(start, argument):
    options = ("--launcher-nproc-per-node", "8", "--launcher-watch", "1")
    options += ("--launcher-hang-notify", "12", "--launcher-hang-timeout", "13")
    recorder = {"TORCH_FR_BUFFER_SIZE": "2000" if argument == "recorded" else "0"}
    host = start("--train-script", SCRIPT, *options, argument, **recorder)
    assert host.wait(250) == 0 and "no progress" not in host.err, host.log()
    assert host.out.count("all parts done") == 8
