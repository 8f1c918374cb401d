"""train_ddp.py with real pictures: a ResNet18 learns to tell ants from bees.

One process:        python train_hymenoptera.py --data hymenoptera_data
One host:           torchrun --nproc-per-node 2 train_hymenoptera.py --data hymenoptera_data
One or more hosts:  sm-launch --train-script train_hymenoptera.py

On SageMaker the pictures come from the channels `train` and `val` (CLASS/*.jpg in each), weights
from the channel `weights` if there is one. Schedule and augmentation are those of PyTorch's
transfer learning tutorial. A stopped job goes on where it was (checkpoints.py). The model goes to
SM_MODEL_DIR, with a program that needs neither this script nor torchvision; metrics and pictures to
SM_OUTPUT_DATA_DIR. Runs on CPU (gloo) and GPU (nccl).
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import CHECKPOINT_DIR, MODEL_DIR, OUTPUT_DATA_DIR, switch, switch_or_auto
from checkpoints import Checkpoints, Progress, prime
from pictures import Draws, Normalize, make_loader, train_and_val
from precision import Precision
from process_group import end_host, end_together, join_group, leave_group
from results import Results
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18
from weights import load_weights

WARM_UP = 5  # epochs, for a learning rate that was scaled up (Goyal et al., arXiv 1706.02677)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with train/ and val/; else the channels")
    parser.add_argument("--weights", help="imagenet, none or a file; else channel, else imagenet")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per rank and step")
    parser.add_argument("--lr", type=float, default=0.008, help="the tutorial's, for 32 pictures")
    parser.add_argument("--lr-step", type=int, default=7, help="epochs until a tenth of it")
    parser.add_argument("--scale-lr", type=switch, default=False, help="times the number of ranks")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl", "smddp"], default="auto")
    parser.add_argument("--bf16", type=switch_or_auto, help="autocast; auto: where it is faster")
    parser.add_argument("--channels-last", type=switch_or_auto, help="auto: true")
    parser.add_argument("--cache", type=switch_or_auto, help="decode once; auto: if it fits")
    parser.add_argument("--workers", type=int, help="processes that load; by default by device")
    parser.add_argument("--pin-memory", type=switch_or_auto, help="auto: for GPUs")
    parser.add_argument("--compile", type=switch, default=False)
    parser.add_argument("--sync-bn", type=switch, default=False, help="statistics of all GPUs")
    parser.add_argument("--checkpoint-dir", default=CHECKPOINT_DIR)
    parser.add_argument("--model-dir", default=MODEL_DIR)
    parser.add_argument("--output-data-dir", default=OUTPUT_DATA_DIR)
    parser.add_argument("--log-every", type=float, default=10, help="seconds between two lines")
    return parser.parse_args()


def setup(args):
    """Join the process group; choose for this rank's device what was left to us, and return it."""
    device = join_group(args.backend)
    if args.sync_bn and device.type == "cpu":
        end_host("--sync-bn needs GPUs: torch's SyncBatchNorm does not run on a CPU")
    args.layout = torch.contiguous_format if args.channels_last is False else torch.channels_last
    if args.pin_memory is None:
        args.pin_memory = device.type == "cuda"
    if args.workers is None:
        # On a CPU they would take the cores that train.
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        args.workers = min(8, max(1, cores - 1)) if device.type == "cuda" else 0
    return device


def make_data(args):
    """Return the pictures to train with and those to validate with."""
    return train_and_val(args.data, args.image_size, args.seed, args.cache)


def make_model(args, classes, device):
    """Return the model, with the weights asked for on rank 0: DDP gives them to the others."""
    torch.manual_seed(args.seed)
    model = resnet18(num_classes=classes)
    error = load_weights(model, args.weights) if dist.get_rank() == 0 else ""
    end_together(error)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device, memory_format=args.layout)
    if args.compile:
        model.compile(dynamic=False)  # the same program for a size, whichever came first
    return model


def train(args, device):
    start = time.monotonic()
    train_data, val_data = make_data(args)
    sampler = Draws(train_data, seed=args.seed)
    options = (args.batch_size, args.workers, args.pin_memory)
    loader = make_loader(train_data, *options, sampler)
    val_loader = make_loader(val_data, *options)

    model = make_model(args, len(train_data.classes), device)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ranks = dist.get_world_size()
    lr = args.lr * (ranks if args.scale_lr else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    warm_up = WARM_UP if args.scale_lr else 0

    def factor(epoch):
        rising = (1 + (ranks - 1) * epoch / warm_up) / ranks if epoch < warm_up else 1
        return rising * 0.1 ** (epoch // args.lr_step)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loss_function = nn.CrossEntropyLoss()
    normalize = Normalize()
    precision = Precision(args.bf16)

    def forward(images, network):
        images = images.to(device, non_blocking=True).contiguous(memory_format=args.layout)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision.bf16):
            return network(normalize(images)).float()

    torch.manual_seed(args.seed + dist.get_rank())
    made_for = {"script": "train_hymenoptera", "model": "resnet18", "classes": train_data.classes}
    made_for.update(lr=lr, lr_step=args.lr_step, seed=args.seed)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "precision": precision}
    progress = Progress(device)
    with Checkpoints(args.checkpoint_dir, made_for, parts) as checkpoints:
        checkpoints.load(progress)
        precision.choose(args, device)
        count = args.batch_size if args.compile else 2  # what is compiled, is for a size
        blank = torch.zeros(count, 3, args.image_size, args.image_size, dtype=torch.uint8)
        prime(ddp_model, lambda network: forward(blank, network))
        results = Results(args.output_data_dir, progress.history, args.log_every)
        to_see = len(train_data) * (args.epochs - progress.epoch) - progress.samples
        for epoch in range(progress.epoch, args.epochs):
            sampler.set_epoch(epoch, progress.samples)  # without it every epoch has the same order
            results.begin(epoch, progress.samples, len(train_data))
            for images, labels in loader:
                labels = labels.to(device, non_blocking=True)
                logits = forward(images, ddp_model)
                loss = loss_function(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.count(loss, logits, labels)
                results.step(progress.samples)
                checkpoints.leave_if_stopped(progress)
            checkpoints.save(progress)  # here, since a stop waits for the end of the validation
            metrics = dict(zip(("train_loss", "train_accuracy"), progress.end_epoch()))
            val = validate(val_loader, model, forward, loss_function, device)
            metrics.update(zip(("val_loss", "val_accuracy"), val))
            progress.history.append({"epoch": epoch, **metrics, "lr": schedule.get_last_lr()[0]})
            results.end(progress.history[-1])
            schedule.step()
            checkpoints.leave_if_stopped(progress)
    seconds = time.monotonic() - start
    if dist.get_rank() == 0:
        print(f"trained in {seconds:.1f} s: {max(0, to_see) / seconds:.1f} pictures/s", flush=True)
        results.draw(save(model, train_data.classes, args), val_data)


@torch.inference_mode()
def validate(loader, model, forward, loss_function, device):
    """Return mean loss and accuracy over the pictures of all ranks, each counted once."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # each rank has batch statistics of its own; rank 0's are saved
    seen = Progress(device)
    model.eval()
    for images, labels in loader:
        labels = labels.to(device, non_blocking=True)
        logits = forward(images, model)
        seen.count(loss_function(logits, labels), logits, labels)
    model.train()
    return seen.end_epoch()


def save(model, classes, args):
    """Save the weights, the labels, and a program that classifies without this script.

    A reader of the folder sees a whole file or none. Returns what the program was made of, on CPU.
    """
    os.makedirs(args.model_dir, exist_ok=True)
    alone = resnet18(num_classes=len(classes))
    alone.load_state_dict(model.state_dict())
    classifier = nn.Sequential(Normalize(), alone, nn.Softmax(dim=1)).eval()
    blank = torch.zeros(2, 3, args.image_size, args.image_size, dtype=torch.uint8)
    shapes = ({0: torch.export.Dim("pictures")},)
    # What torch 2.4 writes of a strict export it cannot read.
    program = torch.export.export(classifier, (blank,), dynamic_shapes=shapes, strict=False)
    labels = {"labels": classes, "image_size": args.image_size}
    for name, write in {
        "model.pt": lambda path: torch.save(alone.state_dict(), path),
        "model.pt2": lambda path: torch.export.save(program, path),
        "labels.json": lambda path: Path(path).write_text(json.dumps(labels)),
    }.items():
        path = os.path.join(args.model_dir, name)
        temporary = os.path.join(args.model_dir, "new-" + name)  # torch wants its .pt2
        write(temporary)
        os.replace(temporary, path)
        print(f"saved {path}", flush=True)
    return classifier


def main():
    args = parse_args()
    device = setup(args)
    try:
        train(args, device)
    finally:
        leave_group()


if __name__ == "__main__":
    main()
