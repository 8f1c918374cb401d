"""The reference script learns, alone and as ranks, and goes on where it was stopped."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LAUNCHER, TRAIN_DDP, completed

pytestmark = pytest.mark.torch


def test_it_learns_and_saves(tmp_path, monkeypatch):
    monkeypatch.setenv("SM_MODEL_DIR", str(tmp_path / "model"))
    folder = tmp_path / "copied"  # the script and its helper are all that it needs
    folder.mkdir()
    for path in (TRAIN_DDP, TRAIN_DDP.with_name("checkpoints.py")):
        shutil.copy(path, folder)
    words = ("--launcher-nproc-per-node", "2", "--train-script", folder / TRAIN_DDP.name)
    done = completed(*LAUNCHER, *words, "--epochs", "4")
    losses = [float(text) for text in re.findall(r"loss=([\d.]+)", done.stdout)]
    accuracies = [float(text) for text in re.findall(r"accuracy=([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert accuracies[-1] > 0.9
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.pt"]
    assert not os.path.exists("checkpoints")


def test_the_loss_is_that_of_all_ranks(ranks, tmp_path):
    # Two ranks of 32 see in an epoch what one of 64 sees: the same samples, the same steps.
    losses = []
    for count, batch in ((0, "64"), (2, "32")):
        done = ranks.run(TRAIN_DDP, "--epochs", "1", "--batch-size", batch, count=count)
        assert set(done.codes) == {0}, done.err
        losses.append(float(re.search(r"loss=([\d.]+)", done.out)[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_stops_at_random_steps_change_nothing(ranks, stopping):
    shape = ("--samples", "1000", "--epochs", "3", "--batch-size")
    job = (stopping(TRAIN_DDP), *shape, "25", "--checkpoint-dir")

    def run(folder, stop_at):
        environ = {"SM_MODEL_DIR": f"{folder}-model", "STOP_AT": str(stop_at)}
        return ranks.run(*job, folder, count=4, **environ).codes

    def model(folder):
        return Path(f"{folder}-model", "model.pt")

    assert run("whole", -1) == [0] * 4
    stops = sorted(random.sample(range(1, 3 * 10 + 1), 3))
    for stop, before in zip(stops, [0, *stops]):
        assert run("stopped", stop - before) == [143] * 4, stops
        place = f"checkpoint-{(stop - 1) // 10:06}-{((stop - 1) % 10 + 1) * 100:012}.pt"
        assert sorted(os.listdir("stopped"))[-1] == place, stops
    shutil.copytree("stopped", "moved")
    assert run("stopped", -1) == [0] * 4, stops
    assert model("whole").read_bytes() == model("stopped").read_bytes(), stops

    # On one rank with batches as large as those of four together it goes on with the same samples.
    job = (TRAIN_DDP, *shape, "100", "--checkpoint-dir", "moved", "--model-dir", "moved-model")
    done = ranks.run(*job)
    assert done.codes == [0], done.err
    import torch

    one, other = (torch.load(model(folder), weights_only=True) for folder in ("whole", "moved"))
    for name, weights in one.items():
        assert torch.allclose(weights, other[name], atol=1e-3), (stops, name)


@pytest.mark.parametrize(
    ("name", "stops"),
    [("train_ddp.py", (15, 2)), ("train_hymenoptera.py", (15, 2)), ("train_transformer.py", (15,))],
)
def test_each_script_handles_a_stop_before_its_slow_imports(name, stops, tmp_path, monkeypatch):
    killed = f"import signal\nfor number in {stops}: signal.raise_signal(number)\n"
    for module in ("torch", "numpy"):
        (tmp_path / f"{module}.py").write_text(killed + "raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = TRAIN_DDP.with_name(name)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [("--batch-size", "0", 1), ("--samples", "0", 1), ("--epochs", "-1", 0), ("--lr", "nan", 0)],
)
def test_a_number_that_cannot_be_is_said_in_one_line(ranks, option, value, least):
    done = ranks.run(TRAIN_DDP, option, value)
    assert done.codes == [2]
    assert done.err.endswith(f": error: {option} {value}: expected {least} or more\n")
