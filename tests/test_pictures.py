"""The pictures that train_hymenoptera.py sees, in one process."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DRAW_PICTURES

pytestmark = pytest.mark.torch


@pytest.fixture
def pictures(reference):
    return reference("pictures")


def test_drawn_ones_are_always_the_same(tmp_path):
    def drawn(*options):
        folder = tmp_path / "drawn"
        argv = [sys.executable, str(DRAW_PICTURES), str(folder), *options]
        subprocess.run([*argv, "--train", "4", "--val", "2", "--size", "48"], check=True)
        files = sorted(folder.rglob("*.jpg"))
        content = b"".join(file.read_bytes() for file in files)
        return [str(file.relative_to(folder)) for file in files], hashlib.sha256(content).digest()

    names, content = drawn()
    assert names == [
        *("train/ants/0000.jpg", "train/ants/0002.jpg"),
        *("train/bees/0001.jpg", "train/bees/0003.jpg", "val/ants/0000.jpg", "val/bees/0001.jpg"),
    ]
    shutil.rmtree(tmp_path / "drawn")
    assert drawn() == (names, content)
    assert drawn("--seed", "1") != (names, content)


def test_how_a_picture_is_cut_depends_on_seed_epoch_and_index_alone(pictures, ants_and_bees):
    import torch

    def seen(keep, seed=0):
        data = pictures.Pictures(ants_and_bees / "train", 32, train=True, seed=seed, keep=keep)
        return {key: data[key][0] for key in ((0, 1), (0, 2), (1, 1), (0, 1))}

    kept, not_kept, other = seen(True), seen(False), seen(True, seed=1)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for key, picture in kept.items():
        assert picture.shape == (3, 32, 32) and picture.dtype == torch.uint8
        assert torch.equal(picture, not_kept[key])
        assert not torch.equal(picture, other[key])
    assert not torch.equal(kept[0, 1], kept[1, 1])
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_sees_the_middle_of_each_picture(pictures, ants_and_bees):
    import torch
    from PIL import Image
    from torchvision.transforms import v2

    data = pictures.Pictures(ants_and_bees / "val", 64, train=False)
    usual = v2.Compose([v2.PILToTensor(), v2.Resize(73, antialias=True), v2.CenterCrop(64)])
    for index, (path, label) in enumerate(data.samples):
        picture, given = data[index]
        assert given == label == data.classes.index(Path(path).parent.name)
        difference = picture.float() - usual(Image.open(path)).float()
        assert difference.abs().mean() < 8  # of 255: the same but for how it is scaled
        assert torch.equal(picture, data[index][0])


def test_a_picture_that_is_none_is_named_and_left_out(pictures, ants_and_bees, tmp_path, capsys):
    folder = shutil.copytree(ants_and_bees / "train", tmp_path / "train")
    whole = len(pictures.Pictures(folder, 32, train=True))
    cut, none = folder / "ants" / "0000.jpg", folder / "bees" / "none.jpg"
    cut.write_bytes(cut.read_bytes()[:500])
    none.write_text("no picture")
    capsys.readouterr()
    data = pictures.Pictures(folder, 32, train=True)
    out = capsys.readouterr().out
    for path in (cut, none):
        assert f"warning: {path} is left out: " in out
        assert str(path) not in [sample for sample, _ in data.samples]
    assert len(data) == whole - 1
    assert f"2 of 43 pictures in {folder} left out\n" in out
    for number in range(3):
        (folder / "ants" / f"none-{number}.jpg").touch()
    with pytest.raises(SystemExit, match=r"^5 of 46 pictures cannot be read, more than 5%; the fi"):
        pictures.Pictures(folder, 32, train=True)


def test_a_class_of_which_none_is_left(pictures, ants_and_bees, tmp_path):
    folder = shutil.copytree(ants_and_bees / "train", tmp_path / "train")
    shutil.rmtree(folder / "ants")
    (folder / "ants").mkdir()
    (folder / "ants" / "only.jpg").touch()  # of 22 pictures in all
    with pytest.raises(SystemExit, match=rf"^no picture in {folder}/ants can be read"):
        pictures.Pictures(folder, 32, train=True)


def test_they_stay_in_memory_if_they_fit(pictures, ants_and_bees, monkeypatch):
    paths = [str(path) for path in ants_and_bees.rglob("*.jpg")]
    assert pictures.fits(paths)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**8))  # each rank keeps its own
    assert not pictures.fits(paths)
