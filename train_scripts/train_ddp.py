"""minimal_ddp.py with options, checkpoints and a stop that saves.

One process:        python train_ddp.py
One host:           torchrun --nproc-per-node 2 train_ddp.py --epochs 5
One or more hosts:  sm-launch --train-script train_ddp.py --epochs 5
Open MPI:           mpirun -n 2 python train_ddp.py

It needs torch and the modules beside it, runs on CPU (gloo) or GPU (nccl), and saves the model to
SM_MODEL_DIR. A stopped job goes on where it was (checkpoints.py). train_hymenoptera.py is the same
for pictures.
"""

import argparse
import os

import torch
import torch.distributed as dist
from arguments import CHECKPOINT_DIR, MODEL_DIR, switch
from checkpoints import Checkpoints, ResumableSampler
from compression import METHODS, compress
from deterministic import RandomStates, prime
from metrics import Progress
from process_group import BACKENDS, end_step, join_group, leave_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--compress", choices=METHODS, help="send gradients in fewer bytes")
    parser.add_argument("--deterministic", type=switch, default=False, help="resume bit by bit")
    parser.add_argument("--checkpoint-dir", default=CHECKPOINT_DIR)
    parser.add_argument("--model-dir", default=MODEL_DIR)
    args = parser.parse_args()
    if args.deterministic and args.compress == "powersgd":
        parser.error("--deterministic cannot go with powersgd, whose state no checkpoint keeps")
    return args


def make_data(samples, seed):
    """Return points in a square, and for each the class of the spiral arm it lies on."""
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
    # With a generator of its own the loader leaves alone the random state that a checkpoint has.
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, generator=torch.Generator())

    model = make_model(args.seed, device)
    ddp_model = DistributedDataParallel(model)
    compress(ddp_model, args.compress)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loss_function = nn.CrossEntropyLoss()
    parts = {"model": model, "optimizer": optimizer}
    if args.deterministic:
        # DDP's first step rounds otherwise than the later ones; a resumed job has one, too.
        prime(ddp_model, lambda network: network(torch.zeros(1, 2, device=device)))
        parts["random"] = RandomStates()

    progress = Progress(device)
    made_for = {"script": "train_ddp", "model": str(model), "lr": args.lr, "seed": args.seed}
    with Checkpoints(args.checkpoint_dir, made_for, parts) as checkpoints:
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
                end_step(device)
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
    device = join_group(args.backend)
    try:
        model = train(args, device)
        if dist.get_rank() == 0:
            save(model, args.model_dir)
    finally:
        leave_group()


if __name__ == "__main__":
    main()
