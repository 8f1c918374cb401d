"""train_hymenoptera.py as jobs: real pictures, real ranks under the launcher, real stops."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TRAIN_HYMENOPTERA

pytestmark = [pytest.mark.torch]

SMALL = ("--weights", "none", "--image-size", "64", "--batch-size", "4", "--lr", "0.01")


@pytest.fixture
def channels(ants_and_bees, monkeypatch):
    for part in ("train", "val"):
        monkeypatch.setenv(f"SM_CHANNEL_{part.upper()}", str(ants_and_bees / part))


def folders(name):
    """Return arguments that give a job folders of its own."""
    os.environ["SM_OUTPUT_DATA_DIR"] = f"{name}/data"  # which clean_environment drops again
    return [f"--checkpoint-dir={name}/checkpoints", f"--model-dir={name}/model"]


def metrics(name):
    """Return a job's metrics, but for how fast it was."""
    lines = Path(name, "data", "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "images_per_second": 0} for line in lines]


@pytest.mark.systems
def test_a_stopped_job_ends_with_the_weights_of_one_that_was_not(ranks, stopping, channels):
    import torch

    job = (*SMALL, "--epochs", "2", "--bf16", random.choice(["true", "false"]))
    whole = ranks.run(TRAIN_HYMENOPTERA, *job, *folders("whole"), count=4)
    assert whole.codes == [0] * 4, whole.err
    job += tuple(folders("other"))
    step = random.randrange(1, 4)  # of the first epoch, which has three
    stopped = ranks.run(stopping(TRAIN_HYMENOPTERA), *job, count=4, STOP_AT=str(step))
    assert stopped.codes == [143] * 4, stopped.err
    place = f"other/checkpoints/checkpoint-000000-{min(step * 16, 44):012}.pt"  # of 42, padded
    assert f"stopped by SIGTERM; saved {place}" in stopped.out
    last = ranks.run(TRAIN_HYMENOPTERA, *job, count=4)
    assert last.codes == [0] * 4 and f"resuming from {place}" in last.out, last.err
    one, other = (torch.load(path, weights_only=True) for path in Path().glob("*/model/model.pt"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert metrics("whole") == metrics("other")
    assert len(os.listdir("other/checkpoints")) == 2


# Each rank leaves a file that says whether its network computed in bf16.
TYPED = f"""
import sys
sys.path.insert(0, {str(TRAIN_HYMENOPTERA.parent)!r})
import torch
import train_hymenoptera as script

normalize = script.Normalize.forward

def noted(self, pictures):
    if self.training:  # not for the program that is saved at the end
        open(f"bf16 is {{torch.is_autocast_enabled('cpu')}}", "w").close()
    return normalize(self, pictures)

script.Normalize.forward = noted
script.main()
"""


def test_bf16_is_for_all_ranks_if_it_is_asked_for(ranks, script, channels):
    job = (script(TYPED), *SMALL, "--epochs", "1", "--bf16", "True")
    done = ranks.run(*job, *folders("job"), count=2)
    assert done.codes == [0, 0], done.err
    assert [path.name for path in Path.cwd().glob("bf16 *")] == ["bf16 is True"]


def test_how_a_picture_is_cut_depends_on_seed_epoch_and_index_alone(reference):
    import torch

    script = reference("train_hymenoptera")
    pictures = [(torch.randint(256, (3, 60, 70), dtype=torch.uint8), 1)] * 2

    def cut(seed, epoch, index):
        return script.Augmented(pictures, 40, seed)[epoch, index][0]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = cut(0, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(9)
    assert torch.equal(cut(0, 0, 0), first)
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(cut(*other), first)


# Each rank leaves a file with its pictures' sums.
SHARES = f"""
import sys
sys.path.insert(0, {str(TRAIN_HYMENOPTERA.parent)!r})
import torch.distributed as dist
from train_hymenoptera import leave_group, read_pictures

dist.init_process_group("gloo")
folders = sys.argv[1:]
share = slice(dist.get_rank(), None, dist.get_world_size())
middle = lambda image: image.crop((0, 0, 9, 9))
folder = folders[dist.get_rank() % len(folders)]
classes, pictures = read_pictures(folder, "val", middle, share)
with open(f"share-{{dist.get_rank()}}", "w") as file:
    file.writelines(f"{{picture.sum()}}\\n" for picture, _ in pictures)
leave_group()
"""


def test_validation_counts_each_picture_once(ranks, script, ants_and_bees):
    shares = []
    for count in (1, 4):
        done = ranks.run(script(SHARES), ants_and_bees, count=count)
        assert done.codes == [0] * count, done.err
        files = [Path(f"share-{rank}").read_text() for rank in range(count)]
        shares.append(sorted("".join(files).splitlines()))
    assert len(shares[0]) == 18 and shares[0] == shares[1]


def test_hosts_with_different_pictures(ranks, script, tmp_path, ants_and_bees):
    other = shutil.copytree(ants_and_bees, tmp_path / "other")
    next((other / "val" / "ants").iterdir()).unlink()
    done = ranks.run(script(SHARES), ants_and_bees, other, count=2)
    assert done.codes == [1, 1], done.err
    says = "holds other pictures on other hosts (by rank: 18, 17); expected the same ones"
    assert says in done.err


@pytest.mark.systems
def test_a_weights_channel_and_workers(tmp_path, channels, monkeypatch):
    import torch
    from torchvision.models import resnet18

    (tmp_path / "weights").mkdir()
    thousand = resnet18().state_dict()  # as ImageNet's, with a head for its 1000 classes
    torch.save(thousand, tmp_path / "weights" / "resnet18.pth")
    (tmp_path / "weights" / "model.pt2").touch()  # as our own model folder has it
    monkeypatch.setenv("SM_CHANNEL_WEIGHTS", str(tmp_path / "weights"))
    job = (TRAIN_HYMENOPTERA, *SMALL[2:], "--lr", "0", "--epochs", "1")
    # In a process of its own: a data loader's worker forked from a fork has hung once.
    argv = [sys.executable, *map(str, (*job, "--workers", "1", *folders("job")))]
    subprocess.run(argv, timeout=300, check=True)
    saved = torch.load("job/model/model.pt", weights_only=True)
    assert saved["fc.weight"].shape == (2, 512)
    for name in ("conv1.weight", "layer4.1.conv2.weight"):
        assert torch.equal(saved[name], thousand[name])  # at a learning rate of 0


BAD = {
    "no channel": (["--weights", "none"], {}, "there is no channel 'val'"),
    "no folder": ([], {"SM_CHANNEL_TRAIN": "nowhere"}, "nowhere is no folder of classes"),
    "one class": ([], {"SM_CHANNEL_TRAIN": "one"}, "train holds the classes ['ants'], "),
    "other classes": ([], {"SM_CHANNEL_VAL": "other"}, "val ['ants', 'wasps']; expected"),
    "no weights at all": (["--weights", "odd.pt"], {}, "cannot load the weights odd.pt ("),
    "no network": (
        ["--weights", "imagenet"],
        {"https_proxy": "http://127.0.0.1:1", "TORCH_HOME": "cache"},
        "expected --weights imagenet (network or cache), FILE, a channel 'weights', or none",
    ),
    "two weights": ([], {"SM_CHANNEL_WEIGHTS": "two"}, "the channel 'weights' holds ["),
    "a broken picture": (
        ["--weights", "none"],
        {"SM_CHANNEL_TRAIN": "broken"},
        "1 of 43 pictures in broken cannot be decoded; take them out. The first is broken/ants/x.j",
    ),
    "a switch": (["--bf16", "maybe"], {}, "--bf16: invalid choice: 'maybe' (choose from "),
    "a pixel": (["--image-size", "32"], {}, "--image-size 32: expected 33 or more\n"),
}


@pytest.fixture
def bad_folders(ants_and_bees):
    for name, classes in (("one", ["ants"]), ("other", ["ants", "wasps"])):
        for label in classes:
            source = ants_and_bees / "train" / label.replace("wasps", "bees")
            shutil.copytree(source, Path(name, label))
    shutil.copytree(ants_and_bees / "train", "broken")
    Path("broken", "ants", "x.jpg").write_text("no picture")
    Path("two").mkdir()
    for name in ("odd.pt", "two/one.pt", "two/other.pt"):
        Path(name).write_bytes(b"no weights")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(ranks, case, channels, bad_folders, monkeypatch):
    arguments, environ, says = BAD[case]
    if case == "no channel":
        monkeypatch.delenv("SM_CHANNEL_VAL")
    job = (TRAIN_HYMENOPTERA, *SMALL[2:], *arguments, *folders("job"))
    done = ranks.run(*job, **environ)
    assert done.codes in ([1], [2]), done.out
    assert says in done.err and "Traceback" not in done.err, done.err
    assert not os.path.exists("job/model")


def test_more_ranks_than_pictures(ranks, channels, ants_and_bees):
    for label in ("ants", "bees"):
        Path("few", label).mkdir(parents=True)
        shutil.copy(next((ants_and_bees / "train" / label).iterdir()), Path("few", label))
    job = (TRAIN_HYMENOPTERA, *SMALL, *folders("job"))
    done = ranks.run(*job, count=3, SM_CHANNEL_TRAIN="few")
    assert done.codes == [1, 1, 1], done.err
    assert "there are 2 pictures to train with, too few for 3 ranks\n" in done.err
