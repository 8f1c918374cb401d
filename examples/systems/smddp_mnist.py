"""Train a small network to read digits, with the API of SMDDP, SageMaker's data parallel library.

One process:            sm-launch --launcher-smddp-compat --train-script smddp_mnist.py
One host, 2 processes:  the same with --launcher-nproc-per-node 2
Several hosts, on each: the same; SageMaker sets SM_HOSTS and SM_CURRENT_HOST

The example of SMDDP's document; it draws the digits that the document downloads. It runs on AWS's
library where that is installed, else on the launcher's own, which also runs on CPU. It ends with an
error if the network has not learnt to read.
"""

import argparse
import os
import sys

import smdistributed.dataparallel.torch.distributed as dist
import torch
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# The seven bars of a pocket calculator's digit, on 28 x 28 points, and which ones a digit has.
BARS = {
    "top": (slice(4, 7), slice(9, 19)),
    "middle": (slice(13, 16), slice(9, 19)),
    "bottom": (slice(22, 25), slice(9, 19)),
    "upper left": (slice(4, 16), slice(7, 10)),
    "upper right": (slice(4, 16), slice(18, 21)),
    "lower left": (slice(13, 25), slice(7, 10)),
    "lower right": (slice(13, 25), slice(18, 21)),
}
DIGITS = ["1011111", "0000101", "1110110", "1110101", "0101101"]
DIGITS += ["1111001", "1111011", "1000101", "1111111", "1111101"]


def draw(count, seed):
    """Return `count` noisy digits, each a little off the middle, and their labels."""
    clean = torch.zeros(10, 1, 28, 28)
    for digit, bars in enumerate(DIGITS):
        for (rows, columns), drawn in zip(BARS.values(), bars):
            clean[digit, 0, rows, columns] += float(drawn == "1")
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    shifts = torch.randint(-3, 4, (count, 2), generator=random).tolist()
    digits = clean.clamp(max=1)[labels]
    digits = torch.stack([torch.roll(one, by, (1, 2)) for one, by in zip(digits, shifts)])
    return TensorDataset(digits + 0.5 * torch.randn(digits.shape, generator=random), labels)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 5, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 10),
        )


def train(model, loader, optimizer, device):
    model.train()
    for pictures, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pictures.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    return loss.detach()


@torch.no_grad()
def accuracy(model, dataset, device):
    model.eval()
    pictures, labels = dataset.tensors
    return (model(pictures.to(device)).argmax(1).cpu() == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "runs"))
    args = parser.parse_args()

    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_local_rank())
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    dataset, unseen = draw(2000, seed=1), draw(500, seed=2)
    sampler = DistributedSampler(
        dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank(), seed=0
    )
    batch_size = max(1, args.batch_size // dist.get_world_size())
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    # The document asks for broadcast_buffers=False; this network has no buffers.
    model = DistributedDataParallel(Net().to(device), broadcast_buffers=False)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    correct = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer, device)
        dist.all_reduce(loss, dist.ReduceOp.AVERAGE)
        if dist.get_rank() == 0:
            correct = accuracy(model.module, unseen, device)
            print(f"epoch={epoch} loss={loss.item():.4f} accuracy={correct:.3f}", flush=True)
        scheduler.step()

    if dist.get_rank() == 0:
        os.makedirs(args.model_dir, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(args.model_dir, "smddp_mnist.pt"))
    # All ranks end alike.
    reached = torch.tensor([correct], device=device)
    dist.broadcast(reached, src=0)
    if reached.item() < 0.9:
        sys.exit(f"the network reads {reached.item():.0%} of the digits; expected 90% or more")


if __name__ == "__main__":
    main()
