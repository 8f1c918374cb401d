"""Pictures in torchvision's layout, FOLDER/CLASS/*.jpg, as training and validation want them.

train_hymenoptera.py uses it. It needs torchvision and Pillow.
"""

import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
import torch.distributed as dist
from checkpoints import ResumableSampler
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.models import ResNet18_Weights
from torchvision.transforms import v2

TOO_MANY = 0.05  # of the pictures: so many that are none, and the job ends
# What torchvision's weights were made with: sizes in validation, mean and std of the colours.
USUAL = ResNet18_Weights.IMAGENET1K_V1.transforms()


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
        self._augment = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
        side = round(size * USUAL.resize_size[0] / USUAL.crop_size[0])
        self._middle = v2.Compose([v2.Resize(side), v2.CenterCrop(size)])
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
            image = self._middle(image)
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
                "with train/ and val/ in it"
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


class Normalize(v2.Normalize):
    """Turns uint8 pictures [N, 3, H, W] into what ImageNet's weights expect."""

    def __init__(self):
        # Of 255: v2.ToDtype(scale=True) would make 1 of it, but torch 2.4 cannot export that.
        super().__init__(*([255 * value for value in usual] for usual in (USUAL.mean, USUAL.std)))

    def forward(self, pictures):
        return super().forward(pictures.float())


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
