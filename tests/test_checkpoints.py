"""Checkpoints as the reference scripts use them, in one process; test_hymenoptera.py has jobs."""

import os
import resource
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

pytestmark = pytest.mark.torch


class Job:
    """A model, an optimizer and where it is, with checkpoints."""

    def __init__(self, reference, made_for="this", seed=0):
        import torch

        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        parts = {"model": self.model, "optimizer": self.optimizer}
        made_for = {"script": made_for, "seed": 0}
        self.stops = []
        make = reference("checkpoints").Checkpoints
        self.checkpoints = make("checkpoints", made_for, parts, self.stops)
        self.progress = reference("checkpoints").Progress(torch.device("cpu"))

    def step(self):
        import torch

        points, labels = torch.randn(4, 3), torch.randint(2, (4,))
        logits = self.model(points)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress.count(loss, logits, labels)

    def save(self):
        with self.checkpoints as checkpoints:
            checkpoints.save(self.progress)

    def load(self):
        with self.checkpoints as checkpoints:
            checkpoints.load(self.progress)
        return self

    def state(self):
        weights = [parameter.tolist() for parameter in self.model.parameters()]
        return weights, self.progress.sums.tolist(), self.progress.samples


def files():
    return sorted(os.listdir("checkpoints"))


def test_it_goes_on_as_if_it_had_not_stopped(reference):
    import torch

    job = Job(reference)
    job.step()
    job.progress.history.append({"epoch": 0, "loss": 0.5})
    job.save()
    job.step()
    number = torch.rand(1)
    other = Job(reference, seed=1).load()  # another process, but for the process
    other.step()
    assert other.state() == job.state()
    assert other.progress.history == [{"epoch": 0, "loss": 0.5}]
    assert torch.equal(torch.rand(1), number)
    assert other.progress.end_epoch() == job.progress.end_epoch()
    assert (other.progress.epoch, other.progress.samples) == (1, 0)


def truncate(path, job):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path, job):
    data = bytearray(path.read_bytes())
    data[data.index(job.model.weight.detach().numpy().tobytes())] ^= 1
    path.write_bytes(data)


def replace(path, job):
    import torch

    torch.save({"weights": torch.ones(3)}, path)


@pytest.mark.parametrize("harm", [truncate, flip_a_bit, replace])
def test_what_is_no_whole_checkpoint_is_named_and_passed_over(reference, harm, capsys):
    job = Job(reference)
    job.step()
    job.save()
    whole = job.state()
    job.step()
    job.save()
    newest = Path("checkpoints", files()[-1])
    harm(newest, job)
    assert Job(reference, seed=1).load().state() == whole
    out = capsys.readouterr().out
    assert f"passing over {newest}, no whole checkpoint: " in out
    assert "resuming from checkpoints/checkpoint-000000-000000000004.pt\n" in out
    assert len(files()) == 2


def test_the_newest_two_are_kept_and_what_is_newer_or_no_job_wrote(reference):
    job = Job(reference)
    job.progress.epoch = 7
    job.save()
    damaged = Path("checkpoints", *files())
    os.truncate(damaged, 100)
    for name in ("checkpoint-best.pt", "checkpoint-last.pt", "model.pt"):
        Path("checkpoints", name).write_text("mine")
    there = files()
    job = Job(reference).load()  # from the start
    for _ in range(4):
        job.step()
        job.save()
    written = [f"checkpoint-000000-{samples:012}.pt" for samples in (12, 16)]
    assert files() == sorted(there + written)


def test_one_that_was_made_for_something_else_ends_the_job(reference):
    Job(reference, made_for="that").save()
    before = files()
    with pytest.raises(SystemExit) as raised:
        Job(reference).load()
    text = f"checkpoints/{before[0]} is a checkpoint of {{'script': 'that'}}, and this is "
    assert str(raised.value) == text + "{'script': 'this'}; choose another --checkpoint-dir"
    assert files() == before


def test_no_room(reference, capsys):
    job = Job(reference)
    job.step()
    job.save()
    whole = job.state()
    job.step()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(SystemExit) as raised:
            job.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    path = "checkpoints/checkpoint-000000-000000000008.pt"
    assert str(raised.value) == f"cannot write the checkpoint {path}: File too large"
    assert files() == ["checkpoint-000000-000000000004.pt", "checkpoint.tmp"]
    assert Job(reference, seed=1).load().state() == whole


def test_a_stop_saves_and_leaves(reference, capsys):
    job = Job(reference)
    with job.checkpoints as checkpoints, pytest.raises(SystemExit) as raised:
        checkpoints.leave_if_stopped(job.progress)
        job.stops.append(signal.SIGINT)
        job.step()
        checkpoints.leave_if_stopped(job.progress)
    assert raised.value.code == 128 + signal.SIGINT
    assert "stopped by SIGINT; saved checkpoints/checkpoint-" in capsys.readouterr().out
    assert Job(reference, seed=1).load().state() == job.state()


def test_one_that_cannot_be_read_ends_the_job(reference, monkeypatch):
    Job(reference).save()  # of root, whom no permission stops
    refused = PermissionError(13, "Permission denied", "checkpoints/here")
    monkeypatch.setattr("builtins.open", Mock(side_effect=refused))
    with pytest.raises(SystemExit) as raised:
        Job(reference).load()
    assert str(raised.value) == "cannot read the checkpoint checkpoints/here: Permission denied"
