"""Pictures in torchvision's layout, FOLDER/CLASS/*.jpg, as training and validation want them.

    python pictures.py FOLDER     makes the synthetic ants and bees there, to look at

train_hymenoptera.py uses it. It needs torchvision and Pillow.
"""

import hashlib
import math
import os
import random
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFilter, ImageOps
from resume import ResumableSampler
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

DRAWN = 1  # to be raised whenever the made-up pictures change
TOO_MANY = 0.05  # of the pictures: so many that are none, and the job ends
BORDER = 0.0625  # on each side: what Resize(256) and CenterCrop(224) cut off besides the longer one


class Pictures(Dataset):
    """The pictures of a folder as uint8 tensors of shape [3, size, size], with their class.

    All ranks make it together, of the same files. Each first decodes its share of them, or all if
    they are to train and stay in memory (keep; if it is None, `fits` judges). Those that cannot be
    decoded are named, left out on all ranks, and end the job if they are too many.
    """

    def __init__(self, folder, size, *, train, seed=0, keep=None):
        try:
            found = ImageFolder(folder)
        except OSError as error:  # names the empty class, or the folder without any
            sys.exit(f"{folder} is no folder of classes with pictures: {error}")
        self.folder, self.classes = folder, found.classes
        self.size, self.train, self.seed = size, train, seed
        paths = [path for path, _ in found.samples]
        _expect_the_same_everywhere(folder, paths)
        self.keep = fits(paths) if keep is None else keep
        self._augment = v2.Compose(
            [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
        )
        ranks = dist.get_world_size()
        share = slice(None) if train and self.keep else slice(dist.get_rank(), None, ranks)
        mine = range(len(paths))[share]
        threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        with ThreadPoolExecutor(threads) as pool:
            decoded = dict(zip(mine, pool.map(self._try, [paths[i] for i in mine])))
        everywhere = [None] * ranks
        dist.all_gather_object(
            everywhere, {i: why for i, why in decoded.items() if isinstance(why, str)}
        )
        lost = {i: why for part in everywhere for i, why in part.items()}
        self._report(found.samples, lost)
        # Validation has each picture on one rank alone; training shuffles them over all ranks.
        used = [i for i in (range(len(paths)) if train else mine) if i not in lost]
        self.samples = [found.samples[i] for i in used]
        self._kept = [decoded[i] for i in used] if self.keep else None

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, key):
        """Return picture and class; key is (epoch, index) in training, else the index.

        How a picture is cut and mirrored is a function of seed, epoch and index alone: whichever
        rank or worker does it, and wherever in the epoch a job goes on, it comes out the same.
        """
        epoch, index = key if self.train else (0, key)
        path, label = self.samples[index]
        picture = self._kept[index] if self._kept else self._decode(path)
        if self.train:
            with torch.random.fork_rng(devices=[]):
                seed = hash((self.seed, epoch, index)) & (2**63 - 1)  # of numbers: always the same
                torch.default_generator.manual_seed(seed)
                picture = self._augment(picture)
        return picture, label

    def _decode(self, path):
        with Image.open(path) as image:
            image = image.convert("RGB")
        if not self.train:
            image = centre(image, self.size)
        # The bytes stay in the order of the file: torch cuts and scales those fastest.
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)

    def _try(self, path):
        """Return the picture, if it is kept; a str says why it is none."""
        try:
            picture = self._decode(path)
        except Exception as error:  # Pillow's decoders have many for what is no picture
            return str(error) or type(error).__name__
        return picture if self.keep else None

    def _report(self, found, lost):
        if not lost:
            return
        lost = {found[i][0]: why for i, why in sorted(lost.items())}
        if dist.get_rank() == 0:
            for path, why in lost.items():
                print(f"warning: {path} is left out: {why}", flush=True)
            print(f"{len(lost)} of {len(found)} pictures in {self.folder} left out", flush=True)
        path, why = next(iter(lost.items()))
        if len(lost) > TOO_MANY * len(found):
            sys.exit(
                f"{len(lost)} of {len(found)} pictures cannot be read, more than "
                f"{TOO_MANY:.0%}; the first is {path}: {why}"
            )
        for label, name in enumerate(self.classes):
            if all(path in lost for path, its in found if its == label):
                sys.exit(f"no picture in {os.path.join(self.folder, name)} can be read")


class Draws(ResumableSampler):
    """Yields (epoch, index): how a picture is augmented depends on both."""

    def __iter__(self):
        return ((self.epoch, index) for index in super().__iter__())


def train_and_val(folder, size, seed=0, keep=None):
    """Return the pictures to train with and those to validate with.

    They lie in train/ and val/ of folder, or, without one, in SageMaker's channels of these names.
    Ends the job if these are not there, differ in classes, or are too few to train with.
    """
    both = []
    for part in ("train", "val"):
        channel = f"SM_CHANNEL_{part.upper()}"
        path = os.path.join(folder, part) if folder else os.environ.get(channel)
        if not path:
            sys.exit(
                f"there is no channel {part!r} ({channel}); give fit() one, or --data a folder "
                "with train/ and val/ in it, or --data synthetic"
            )
        both.append(Pictures(path, size, train=part == "train", seed=seed, keep=keep))
    train, val = both
    if len(train.classes) < 2 or val.classes != train.classes:
        sys.exit(
            f"{train.folder} holds the classes {train.classes}, {val.folder} {val.classes}; "
            "expected the same two or more folders of pictures in both"
        )
    if len(train) < dist.get_world_size():
        sys.exit(
            f"{train.folder} has {len(train)} pictures, too few for {dist.get_world_size()} ranks"
        )
    return train, val


def make_loader(pictures, batch_size, workers, pin_memory, sampler=None):
    """Return what yields batches: uint8 [N, 3, size, size] and the classes [N]."""
    if pictures.keep and not pictures.train:
        workers = 0  # there is nothing left to do
    return DataLoader(
        pictures,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,  # shares the pictures
        # With one of its own the loader leaves alone what a checkpoint remembers.
        generator=torch.Generator(),
    )


def _expect_the_same_everywhere(folder, paths):
    """End the job if a rank has other files: each takes its share of what it believes is there."""
    names = "\n".join(os.path.relpath(path, folder) for path in paths)
    everywhere = [None] * dist.get_world_size()
    mine = (len(paths), hashlib.sha256(names.encode()).hexdigest())
    dist.all_gather_object(everywhere, mine)
    if len(set(everywhere)) > 1:
        counts = ", ".join(str(count) for count, _ in everywhere)
        sys.exit(
            f"{folder} holds other pictures on other hosts (seen by rank: {counts}); expected the "
            "same ones: a channel has to be FullyReplicated"
        )


class Normalize(nn.Module):
    """Turns uint8 pictures [N, 3, H, W] into what ImageNet's weights were trained with."""

    def __init__(self):
        super().__init__()
        for name, values in (("mean", (0.485, 0.456, 0.406)), ("std", (0.229, 0.224, 0.225))):
            self.register_buffer(name, 255 * torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, pictures):
        return (pictures.float() - self.mean) / self.std


def centre(image, size):
    """Return the middle of a Pillow image, size x size pixels, as validation sees it."""
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR, bleed=BORDER)


def fits(paths):
    """Tell whether all ranks of this host can keep these decoded in half of its free memory."""
    pixels = []
    for path in paths[:: max(1, len(paths) // 32)]:
        try:
            with Image.open(path) as image:
                pixels.append(image.width * image.height)
        except Exception:
            pass  # said when it is to be decoded
    with open("/proc/meminfo") as lines:  # proc(5)
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    needed = 3 * len(paths) * sum(pixels) / max(1, len(pixels))
    return needed * int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < free / 2


def synthetic(seed=0, train=240, val=80, size=160):
    """Return a folder with made-up ants and bees in train/ and val/, and make it if need be.

    The same arguments give the same files. It stays in the folder for temporary files.
    """
    name = f"ants-and-bees-{DRAWN}-{seed}-{train}-{val}-{size}"
    folder = os.path.join(tempfile.gettempdir(), name)
    if not os.path.isdir(folder):
        making = tempfile.mkdtemp(prefix=f"{name}-", dir=tempfile.gettempdir())
        make_synthetic(making, seed, train, val, size)
        os.chmod(making, 0o755)  # for whoever comes next
        try:
            os.rename(making, folder)  # all of it or nothing, whoever else makes it now
        except OSError:
            shutil.rmtree(making)
    return folder


def make_synthetic(folder, seed=0, train=240, val=80, size=160):
    """Draw the pictures: half ants, half bees, on ground and on leaves alike."""
    for part, count in (("train", train), ("val", val)):
        for index in range(count):
            draw, label = ((_ant, "ants"), (_bee, "bees"))[index % 2]
            dice = random.Random(f"{seed} {part} {index}")
            path = os.path.join(folder, part, label)
            os.makedirs(path, exist_ok=True)
            _picture(draw, dice, size).save(os.path.join(path, f"{index:04}.jpg"), quality=85)


def _picture(draw, dice, size):
    ground = dice.choice([(120, 95, 60), (80, 130, 60), (150, 140, 120), (60, 100, 50)])
    noise = numpy.random.default_rng(dice.getrandbits(32)).normal(0, 60, (size, size, 1))
    ground = (numpy.array(ground) + noise).clip(0, 255).astype("uint8")
    image = Image.fromarray(ground).filter(ImageFilter.GaussianBlur(dice.uniform(1, 3)))
    # On a layer of its own, which is turned as a whole.
    layer = Image.new("RGBA", (size, size))
    draw(ImageDraw.Draw(layer), size / 2, size * dice.uniform(0.16, 0.26), dice)
    shift = (dice.uniform(-0.12, 0.12) * size, dice.uniform(-0.12, 0.12) * size)
    layer = layer.rotate(dice.uniform(0, 360), Image.Resampling.BICUBIC, translate=shift)
    image.paste(layer, mask=layer)
    return image


def _ellipse(drawing, x, y, width, height, **colours):
    drawing.ellipse((x - width, y - height, x + width, y + height), **colours)


def _legs(drawing, middle, unit, colour):
    for side in (-1, 1):
        for along in (-0.5, 0.1, 0.7):
            knee = (middle + unit * along * 1.3, middle + side * unit * 0.7)
            foot = (middle + unit * along * 1.9, middle + side * unit * 1.2)
            points = ((middle + unit * along * 0.4, middle), knee, foot)
            drawing.line(points, fill=colour, width=max(1, round(unit / 12)))


def _ant(drawing, middle, unit, dice):
    colour = dice.choice([(25, 15, 10), (90, 35, 15), (50, 20, 15)])
    _legs(drawing, middle, unit, colour)
    for along, length, width in ((-1.0, 0.42, 0.36), (-0.1, 0.5, 0.24), (1.0, 0.75, 0.5)):
        _ellipse(drawing, middle + unit * along, middle, unit * length, unit * width, fill=colour)


def _bee(drawing, middle, unit, dice):
    dark, yellow = (35, 25, 15), (225, dice.randint(150, 190), 40)
    _legs(drawing, middle, unit, dark)
    _ellipse(drawing, middle - unit * 1.1, middle, unit * 0.4, unit * 0.45, fill=dark)
    _ellipse(drawing, middle + unit * 0.15, middle, unit, unit * 0.62, fill=yellow)
    for along in (-0.45, 0.05, 0.55, 0.95):
        half = 0.6 * math.sqrt(max(0.0, 1 - ((along - 0.15) / 1.0) ** 2))
        x = middle + unit * along
        drawing.line(
            (x, middle - unit * half, x, middle + unit * half), fill=dark, width=round(unit / 5)
        )
    for side in (-1, 1):
        wing = (middle + unit * 0.1, middle + side * unit * 0.75, unit * 0.7, unit * 0.35)
        _ellipse(drawing, *wing, fill=(235, 240, 245, 170))


if __name__ == "__main__":
    make_synthetic(sys.argv[1])
