"""The two blocks of docs/guide.md for a script: a stop that saves, and a start that resumes."""

import re
import shutil
import signal

import pytest
from conftest import REPO
from pages import code

pytestmark = [pytest.mark.systems, pytest.mark.torch]

# Rank 1 fails in step 150 of the first attempt. In step 250 ranks wait for a stop, if there is one.
SURROUNDINGS = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device, steps, started = "cpu", 300, []
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
is_broken = "broken" in sys.argv

def train_one_step(step):
    if not started:
        started.append(step)
        print("rank", dist.get_rank(), "begins at", step, flush=True)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if is_broken and (step, restarts, dist.get_rank()) == (150, "0", 1):
        raise ValueError("once")
    if is_broken and step == 250:
        print("rank", dist.get_rank(), "can be stopped", flush=True)
        while not stops:
            time.sleep(0.01)
    loss = model(torch.full((1, 2), step / steps)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
RESULT = """
if dist.get_rank() == 0 and step == steps:
    print("weights", model.module.weight.tolist(), flush=True)
model = None
dist.destroy_process_group()
"""


def test_it_resumes_after_a_failure_and_after_a_stop(start, start_two, script, tmp_path):
    guide = code(REPO / "docs" / "guide.md", "python")
    (handler,) = (block for block in guide if "def stopped(" in block)
    (recipe,) = (block for block in guide if "def load(" in block)
    recipe = recipe.replace("/opt/ml/checkpoints", "checkpoints")
    path = script(SURROUNDINGS + handler + recipe + RESULT)
    whole = start("--train-script", path)
    assert whole.wait() == 0, whole.log()
    weights = re.findall("weights.*", whole.out)
    shutil.rmtree(tmp_path / "checkpoints")

    first, second = start_two("--train-script", path, "broken", "--launcher-max-restarts", "3")
    for host in (first, second):
        host.wait_for("can be stopped", timeout=120)
    second.process.send_signal(signal.SIGTERM)
    assert [first.wait(), second.wait()] == [143, 143], first.log() + second.log()
    for rank, host in enumerate((first, second)):
        assert f"rank {rank} begins at 1\nrank {rank} begins at 101\n" in host.out
    assert "attempt 1 of 4 failed" in first.err

    first, second = start_two("--train-script", path)
    assert [first.wait(), second.wait()] == [0, 0], first.log() + second.log()
    assert "rank 0 begins at 251\n" in first.out and "rank 1 begins at 251\n" in second.out
    assert re.findall("weights.*", first.out) == weights and len(weights) == 1
