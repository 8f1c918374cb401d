"""Nothing is said of a job that moves, however its ranks share the work."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.more]  # alone: a busy machine may stand still itself


def test_nothing_is_said_of_a_job_that_moves(start):
    """As NCCL counts, the model in test_watch_model.py moves."""
    options = ("--launcher-nproc-per-node", "8", "--launcher-watch", "1")
    options += ("--launcher-hang-notify", "12", "--launcher-hang-timeout", "13")
    script = Path(__file__).with_name("moving.py")
    host = start("--train-script", script, *options, TORCH_FR_BUFFER_SIZE="2000")
    assert host.wait(250) == 0 and "no progress" not in host.err, host.log()
    assert host.out.count("all steps done") == 8
