"""The reference script runs unchanged alone, under torchrun and under the launcher."""

import re
import subprocess
import sys

import pytest
from conftest import LAUNCHER, TRAIN_DDP

pytestmark = pytest.mark.torch

HOW = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "launcher": [*LAUNCHER, "--launcher-nproc-per-node", "2", "--train-script"],
}


@pytest.mark.parametrize("how", HOW)
def test_it_learns_and_saves(how, tmp_path, monkeypatch):
    monkeypatch.setenv("SM_MODEL_DIR", str(tmp_path / "model"))
    argv = [*HOW[how], str(TRAIN_DDP), "--epochs", "4"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss=([\d.]+)", done.stdout)]
    accuracies = [float(text) for text in re.findall(r"accuracy=([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert accuracies[-1] > 0.9
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.pt"]


def test_the_loss_is_that_of_all_ranks(tmp_path, monkeypatch):
    # Two ranks of 32 see in an epoch what one of 64 sees: the same samples, the same steps.
    monkeypatch.setenv("SM_MODEL_DIR", str(tmp_path))
    losses = []
    for how, batch in (("alone", "64"), ("torchrun", "32")):
        argv = [*HOW[how], str(TRAIN_DDP), "--epochs", "1", "--batch-size", batch]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True)
        losses.append(float(re.search(r"loss=([\d.]+)", done.stdout)[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


WATCH = f"""
import sys
sys.path.insert(0, {str(TRAIN_DDP.parent)!r})
import torch.distributed as dist
import train_ddp

epochs = []
set_epoch = train_ddp.DistributedSampler.set_epoch
train_ddp.DistributedSampler.set_epoch = lambda self, n: (epochs.append(n), set_epoch(self, n))
fail = sys.argv.pop() == "fail"
if fail:
    train_ddp.save = None  # so that calling it raises
try:
    train_ddp.main()
except TypeError:
    assert fail
else:
    assert not fail
assert epochs == [0, 1], epochs
assert not dist.is_initialized()
"""


@pytest.mark.parametrize("end", ["succeed", "fail"])
def test_every_epoch_is_set_and_the_group_destroyed_on_every_path(script, end):
    argv = [sys.executable, str(script(WATCH)), "--epochs", "2", end]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_it_is_short_enough_to_read_at_one_go():
    assert len(TRAIN_DDP.read_text().splitlines()) <= 120
