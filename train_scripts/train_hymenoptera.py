"""train_ddp.py with real pictures: a ResNet18 learns to tell ants from bees.

One process:        python train_hymenoptera.py --data hymenoptera_data
One host:           torchrun --nproc-per-node 2 train_hymenoptera.py --data hymenoptera_data
One or more hosts:  sm-launch --train-script train_hymenoptera.py

On SageMaker the pictures come from the channels `train` and `val` (CLASS/*.jpg in each), weights
from the channel `weights` if there is one. Schedule and augmentation are those of PyTorch's
transfer learning tutorial. The model goes to SM_MODEL_DIR, with a program that needs neither this
script nor torchvision; metrics and pictures to SM_OUTPUT_DATA_DIR. It needs checkpoints.py beside
it and torchvision, and matplotlib for the pictures.
"""

import signal

stops = []  # signals that told this rank to stop; first of all, since the imports take seconds
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: stops.append(number))

import argparse
import hashlib
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from checkpoints import (
    Checkpoints,
    Progress,
    ResumableSampler,
    end_host,
    end_together,
    join_group,
    leave_group,
    prime,
)
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.models import ResNet18_Weights, resnet18
from torchvision.transforms import v2

# SageMaker's folders, where this runs there.
CHECKPOINT_DIR = "/opt/ml/checkpoints" if os.path.isdir("/opt/ml") else ""
OUTPUT_DIR = Path(os.environ.get("SM_OUTPUT_DATA_DIR", "."))
LOG_EVERY = 10  # seconds
# What torchvision's weights were made with: sizes in validation, mean and std of the colours.
USUAL = ResNet18_Weights.IMAGENET1K_V1.transforms()
RANKS_HERE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
CORES = max(1, len(os.sched_getaffinity(0)) // RANKS_HERE)  # of a rank


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with train/ and val/; else the channels")
    parser.add_argument("--weights", help="imagenet, none or a file; else channel, else imagenet")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per rank and step")
    parser.add_argument("--lr", type=float, default=0.008, help="the tutorial's, for 32 pictures")
    parser.add_argument("--lr-step", type=int, default=7, help="epochs until a tenth of it")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", type=str.lower, choices=["true", "false"], default="false")
    parser.add_argument("--workers", type=int, help="processes that augment; else by device")
    parser.add_argument("--checkpoint-dir", default=CHECKPOINT_DIR)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "."))
    args = parser.parse_args()
    if args.workers is None:  # on a CPU they would take the cores that train
        args.workers = min(8, max(1, CORES - 1)) if torch.cuda.device_count() >= RANKS_HERE else 0
    least = {"epochs": 0, "batch_size": 1, "lr": 0, "lr_step": 1, "workers": 0}
    least["image_size"] = 33  # of 32 a ResNet18 leaves one pixel; BatchNorm needs two to train
    for name, number in least.items():
        value = getattr(args, name)
        if not value >= number:  # nan is not, either
            parser.error(f"--{name.replace('_', '-')} {value}: expected {number} or more")
    return args


def read_pictures(folder, part, prepare, share):
    """Return the classes of a folder and this rank's share of it: [(uint8 [3, H, W], class), ...].

    An error in the folder on one rank ends all ranks.
    """
    channel = f"SM_CHANNEL_{part.upper()}"
    folder = os.path.join(folder, part) if folder else os.environ.get(channel)
    if not folder:
        more = "give fit() one, or --data a folder with train/ and val/ in it"
        end_host(f"there is no channel {part!r} ({channel}); {more}")
    try:
        found = ImageFolder(folder)
    except OSError as error:  # names the empty class, or the folder without any
        end_host(f"{folder} is no folder of classes with pictures: {error}")

    def decode(sample):
        path, label = sample
        try:
            with Image.open(path) as image:
                image = prepare(image.convert("RGB"))
        except Exception as error:  # Pillow's decoders raise many kinds
            return f"{path}: {error}"
        # The bytes stay in the file's order, which torch crops and scales fastest.
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1), label

    with ThreadPoolExecutor(CORES) as pool:
        pictures = list(pool.map(decode, found.samples[share]))
    # A name need not be UTF-8.
    names = os.fsencode("\n".join(os.path.relpath(path, folder) for path, _ in found.samples))
    bad = [one for one in pictures if isinstance(one, str)]
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (len(found), hashlib.sha256(names).hexdigest(), bad))
    if len({digest for _, digest, _ in everywhere}) > 1:
        counts = ", ".join(str(count) for count, _, _ in everywhere)
        more = "expected the same ones: a channel has to be FullyReplicated"
        end_host(f"{folder} holds other pictures on other hosts (by rank: {counts}); {more}")
    bad = sorted({one for _, _, part in everywhere for one in part})
    if bad:
        count = f"{len(bad)} of {len(found)} pictures in {folder}"
        end_host(f"{count} cannot be decoded; take them out. The first is {bad[0]}")
    return [os.fsencode(name).decode(errors="replace") for name in found.classes], pictures


def make_data(args):
    """Return the classes, the pictures to train with, and this rank's to validate with."""
    middle = v2.Resize(round(args.image_size * USUAL.resize_size[0] / USUAL.crop_size[0]))
    middle = v2.Compose([middle, v2.CenterCrop(args.image_size)])
    # Training shuffles them over all ranks; in validation each is on one rank, and counts once.
    one_in_all = slice(dist.get_rank(), None, dist.get_world_size())
    classes, pictures = read_pictures(args.data, "train", lambda image: image, slice(None))
    val_classes, val_pictures = read_pictures(args.data, "val", middle, one_in_all)
    if len(classes) < 2 or val_classes != classes:
        more = "expected the same two or more folders of pictures in both"
        end_host(f"train holds the classes {classes}, val {val_classes}; {more}")
    if len(pictures) < dist.get_world_size():
        more = f"too few for {dist.get_world_size()} ranks"
        end_host(f"there are {len(pictures)} pictures to train with, {more}")
    return classes, Augmented(pictures, args.image_size, args.seed), val_pictures


class Augmented(Dataset):
    """Cuts and mirrors pictures at random, by seed, epoch and index alone.

    The result does not depend on the rank, the worker, or where in an epoch a job resumes.
    """

    def __init__(self, pictures, size, seed):
        self.pictures, self.seed = pictures, seed
        self.augment = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, key):
        picture, label = self.pictures[key[1]]
        with torch.random.fork_rng(devices=[]):
            seed = hash((self.seed, *key)) & (2**63 - 1)  # of numbers: always the same
            torch.default_generator.manual_seed(seed)
            return self.augment(picture), label


class Draws(ResumableSampler):
    """Yields (epoch, index)."""

    def __iter__(self):
        return ((self.epoch, index) for index in super().__iter__())


class Normalize(v2.Normalize):
    """Turns uint8 pictures [N, 3, H, W] into the input that ImageNet's weights expect."""

    def __init__(self):
        # Of 255: v2.ToDtype(scale=True) would make 1 of it, but torch 2.4 cannot export that.
        super().__init__(*([255 * value for value in usual] for usual in (USUAL.mean, USUAL.std)))

    def forward(self, pictures):
        return super().forward(pictures.float())


def load_weights(model, weights):
    """Load a state_dict into the model, except a head for other classes."""
    channel = os.environ.get("SM_CHANNEL_WEIGHTS")
    if channel and not weights:
        files = [path for path in Path(channel).glob("*") if path.suffix in (".pt", ".pth")]
        if len(files) != 1:
            names = [path.name for path in files]
            raise ValueError(f"the channel 'weights' holds {names}; expected one .pt or .pth file")
        weights = files[0]
    if weights in (None, "imagenet"):
        socket.setdefaulttimeout(30)  # seconds; a network that drops packets never answers
        state = ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True)
    else:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    own = model.state_dict()
    if state["fc.bias"].shape != own["fc.bias"].shape:
        state.update({name: own[name] for name in ("fc.weight", "fc.bias")})
    model.load_state_dict(state)


def make_model(args, classes, device):
    """Return the model, with the weights asked for on rank 0: DDP gives them to the others."""
    torch.manual_seed(args.seed)
    model = resnet18(num_classes=classes)
    failed = ""
    if dist.get_rank() == 0 and args.weights != "none":
        try:
            load_weights(model, args.weights)
        except Exception as error:  # no network or file, no state_dict, or one of another model
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            failed = f"cannot load the weights {args.weights or ''} ({reason}); expected --weights "
            failed += "imagenet (network or cache), FILE, a channel 'weights', or none"
    end_together(failed)
    return model.to(device, memory_format=torch.channels_last)  # convolutions are fastest so


def train(args, device):
    start = time.monotonic()
    classes, pictures, val_pictures = make_data(args)
    sampler = Draws(pictures, seed=args.seed)
    loader = DataLoader(
        pictures,
        args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=args.workers > 0,
        multiprocessing_context="fork" if args.workers else None,  # shares the pictures
        generator=torch.Generator(),  # does not change the random state that a checkpoint has
    )
    val_loader = DataLoader(val_pictures, args.batch_size, generator=torch.Generator())
    model = make_model(args, len(classes), device)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step)
    normalize = Normalize()

    def forward(images, network=ddp_model):
        images = images.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16 == "true"):
            return network(normalize(images)).float()

    blank = torch.zeros(2, 3, args.image_size, args.image_size, dtype=torch.uint8)
    prime(ddp_model, lambda network: forward(blank, network))
    torch.manual_seed(args.seed + dist.get_rank())
    progress = Progress(device)
    made_for = {"script": "train_hymenoptera", "model": "resnet18", "classes": classes}
    made_for.update(lr=args.lr, lr_step=args.lr_step, seed=args.seed)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with Checkpoints(args.checkpoint_dir, made_for, parts, stops) as checkpoints:
        checkpoints.load(progress)
        to_see = len(pictures) * (args.epochs - progress.epoch) - progress.samples
        for epoch in range(progress.epoch, args.epochs):
            sampler.set_epoch(epoch, progress.samples)  # without it every epoch has the same order
            began = said = time.monotonic()
            before = min(progress.samples, len(pictures))  # the last ones are padded
            for images, labels in loader:
                labels = labels.to(device, non_blocking=True)
                logits = forward(images)
                loss = nn.functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.count(loss, logits, labels)
                if dist.get_rank() == 0 and time.monotonic() - said >= LOG_EVERY:
                    said = time.monotonic()
                    seen = min(progress.samples, len(pictures))
                    at = f"in epoch {epoch}: {seen} of {len(pictures)} pictures"
                    print(f"{at}, {(seen - before) / (said - began):.1f}/s", flush=True)
                checkpoints.leave_if_stopped(progress)
            checkpoints.save(progress)  # here, since a stop waits for the end of the validation
            metrics = {"epoch": epoch}
            metrics["train_loss"], metrics["train_accuracy"] = progress.end_epoch()
            metrics["val_loss"], metrics["val_accuracy"] = validate(
                val_loader, model, forward, device
            )
            metrics["lr"] = schedule.get_last_lr()[0]
            speed = (len(pictures) - before) / (time.monotonic() - began)
            metrics["images_per_second"] = round(speed, 2)
            progress.history.append(metrics)
            if dist.get_rank() == 0:
                line = " ".join(f"{name}={value:.8g}" for name, value in metrics.items())
                print(line, flush=True)  # as one: logs are read piece by piece under python -u
                write_metrics(progress.history)
            schedule.step()
            checkpoints.leave_if_stopped(progress)
    seconds = time.monotonic() - start
    if dist.get_rank() == 0:
        print(f"trained in {seconds:.1f} s: {max(0, to_see) / seconds:.1f} pictures/s", flush=True)
        write_metrics(progress.history)  # also if there was nothing left to train
        draw(progress.history, save(model, classes, args), classes, val_pictures)


@torch.inference_mode()
def validate(loader, model, forward, device):
    """Return mean loss and accuracy over the pictures of all ranks, each picture counted once."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # each rank has its own batch statistics; rank 0's are saved
    seen = Progress(device)
    model.eval()
    for images, labels in loader:
        labels = labels.to(device)
        logits = forward(images, model)
        seen.count(nn.functional.cross_entropy(logits, labels), logits, labels)
    model.train()
    return seen.end_epoch()


def write_metrics(history):
    """Write a line of JSON for each epoch, also those before this start, whose file is gone."""
    OUTPUT_DIR.mkdir(parents=True, exist_ok=True)
    (OUTPUT_DIR / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in history))


def save(model, classes, args):
    """Save the weights, the labels, and a program that classifies without this script.

    A reader of the folder sees a complete file or none. Returns the exported model, on CPU.
    """
    folder = Path(args.model_dir)
    folder.mkdir(parents=True, exist_ok=True)
    alone = resnet18(num_classes=len(classes))
    alone.load_state_dict(model.state_dict())
    classifier = nn.Sequential(Normalize(), alone, nn.Softmax(dim=1)).eval()
    blank = torch.zeros(2, 3, args.image_size, args.image_size, dtype=torch.uint8)
    shapes = ({0: torch.export.Dim("pictures")},)
    # torch 2.4 cannot read what it writes of a strict export.
    program = torch.export.export(classifier, (blank,), dynamic_shapes=shapes, strict=False)
    labels = json.dumps({"labels": classes, "image_size": args.image_size})
    for name, write in {
        "model.pt": lambda path: torch.save(alone.state_dict(), path),
        "model.pt2": lambda path: torch.export.save(program, path),
        "labels.json": lambda path: path.write_text(labels),
    }.items():
        write(folder / f"new-{name}")  # torch expects .pt2
        os.replace(folder / f"new-{name}", folder / name)
        print(f"saved {folder / name}", flush=True)
    return classifier


@torch.inference_mode()
def draw(history, classifier, classes, pictures):
    """Draw curves.png, and predictions.png with up to twelve pictures and what they show."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        print(f"warning: no curves.png and predictions.png: {error}", flush=True)
        return
    curves = Figure(figsize=(10, 4), layout="constrained")
    epochs = [metrics["epoch"] for metrics in history]
    for axes, what in zip(curves.subplots(1, 2), ("loss", "accuracy")):
        for part in ("train", "val"):
            axes.plot(epochs, [metrics[f"{part}_{what}"] for metrics in history], ".-", label=part)
        axes.set(title=what, xlabel="epoch")
        axes.legend()
    shown = pictures[:: -(-len(pictures) // 12)]
    predictions = Figure(figsize=(10.4, 8.7), layout="constrained")
    for axes in predictions.subplots(3, 4).flat:
        axes.axis("off")
    for axes, (picture, label) in zip(predictions.axes, shown):
        sure, guess = classifier(picture[None])[0].max(dim=0)
        axes.imshow(picture.permute(1, 2, 0).numpy())
        wrong = "" if guess == label else f"\n(it shows {classes[label]})"
        color = "darkred" if wrong else "darkgreen"
        axes.set_title(f"{classes[guess]}, {sure:.0%}{wrong}", color=color)
    for name, figure in (("curves.png", curves), ("predictions.png", predictions)):
        figure.savefig(OUTPUT_DIR / name, dpi=110)
        print(f"saved {OUTPUT_DIR / name}", flush=True)


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file need not be UTF-8
    args = parse_args()
    device = join_group()
    try:
        train(args, device)
    finally:
        leave_group()


if __name__ == "__main__":
    main()
