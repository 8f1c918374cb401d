"""minimal_ddp.py with options, metrics of all ranks, checkpoints and a stop that saves.

One process:        python train_ddp.py
One host:           torchrun --nproc-per-node 2 train_ddp.py --epochs 5
One or more hosts:  sm-launch --train-script train_ddp.py --epochs 5

It needs torch and checkpoints.py, runs on CPU (gloo) or GPU (nccl), and saves the model to
SM_MODEL_DIR. A stopped job resumes where it was, and ends with the same weights as one that was not
stopped: on CPU to the last bit. train_hymenoptera.py is the same for pictures.
"""

import signal

stops = []  # signals that told this rank to stop; first of all, since the imports take seconds
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: stops.append(number))

import argparse
import os

import torch
import torch.distributed as dist
from checkpoints import Checkpoints, Progress, ResumableSampler, join_group, leave_group, prime
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

# SageMaker's folder, if this runs there; elsewhere nothing is saved unless you ask for it.
CHECKPOINT_DIR = "/opt/ml/checkpoints" if os.path.isdir("/opt/ml") else ""


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", default=CHECKPOINT_DIR)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "."))
    args = parser.parse_args()
    for name, least in {"epochs": 0, "batch_size": 1, "lr": 0, "samples": 1}.items():
        value = getattr(args, name)
        if not value >= least:  # nan is not, either
            parser.error(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    return args


def make_data(samples, seed):
    """Return points in a square, and the class of each: the spiral arm that it lies on."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(samples, 2, generator=generator) * 4 - 2
    angle = torch.atan2(points[:, 1], points[:, 0]) + 2 * points.norm(dim=1)
    return TensorDataset(points, (torch.sin(angle) > 0).long())


def make_model(seed, device):
    torch.manual_seed(seed)
    layers = (nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return nn.Sequential(*layers).to(device)


def train(args, device):
    dataset = make_data(args.samples, args.seed)
    sampler = ResumableSampler(dataset, seed=args.seed)
    # With its own generator the loader does not change the random state that a checkpoint has.
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, generator=torch.Generator())

    model = make_model(args.seed, device)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loss_function = nn.CrossEntropyLoss()
    prime(ddp_model, lambda network: network(torch.zeros(1, 2, device=device)))

    progress = Progress(device)
    made_for = {"script": "train_ddp", "model": str(model), "lr": args.lr, "seed": args.seed}
    parts = {"model": model, "optimizer": optimizer}
    with Checkpoints(args.checkpoint_dir, made_for, parts, stops) as checkpoints:
        checkpoints.load(progress)
        for epoch in range(progress.epoch, args.epochs):
            sampler.set_epoch(epoch, progress.samples)  # without it every epoch has the same order
            for points, labels in loader:
                points, labels = points.to(device), labels.to(device)
                logits = ddp_model(points)
                loss = loss_function(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.count(loss, logits, labels)
                checkpoints.leave_if_stopped(progress)
            loss, accuracy = progress.end_epoch()
            if dist.get_rank() == 0:
                print(f"epoch={epoch} loss={loss:.4f} accuracy={accuracy:.4f}", flush=True)
            checkpoints.save(progress)
    return model


def save(model, model_dir):
    """Save the weights; a reader of the folder sees the whole file or none."""
    path = os.path.join(model_dir, "model.pt")
    os.makedirs(model_dir, exist_ok=True)
    torch.save(model.cpu().state_dict(), path + ".tmp")
    os.replace(path + ".tmp", path)
    print(f"saved {path}", flush=True)


def main():
    args = parse_args()
    device = join_group()
    try:
        model = train(args, device)
        if dist.get_rank() == 0:
            save(model, args.model_dir)
    finally:
        leave_group()


if __name__ == "__main__":
    main()
