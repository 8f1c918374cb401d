"""Average gradients by hand, and compare the weights with DistributedDataParallel's.

One process:            python average_gradients.py
One host, 2 processes:  torchrun --nproc-per-node 2 average_gradients.py
Several hosts, on each: sm-launch --train-script average_gradients.py --launcher-nproc-per-node 2

DistributedDataParallel does the same in fewer messages: it sends gradients in buckets of 25 MB,
while backward still computes the next ones. By hand each parameter is a message, after backward.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 20, 16  # samples in a step of one rank
CLOSE = 1e-6  # in another order sums of float32 are rounded differently


def average_gradients(model: nn.Module) -> None:
    """Give all ranks the mean of their gradients."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the sum
        parameter.grad /= dist.get_world_size()


def train(*, by_hand: bool) -> tuple[nn.Module, float]:
    """Return the trained model and the loss of this rank's last step."""
    torch.manual_seed(1)  # the same data on all ranks, of which each takes its own part
    inputs = torch.randn(STEPS, dist.get_world_size(), BATCH, 5)
    targets = torch.sin(inputs.sum(dim=-1, keepdim=True))
    torch.manual_seed(dist.get_rank())  # different weights, until they are made the same
    model: nn.Module = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
    if by_hand:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
    else:
        model = DistributedDataParallel(model)  # it broadcasts them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        mine = step, dist.get_rank()
        loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        if by_hand:
            average_gradients(model)
        optimizer.step()
    return model, loss.item()


def main() -> None:
    """Train both ways and compare."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # neither torchrun nor the launcher: a group of one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one, loss = train(by_hand=True)
    other, _ = train(by_hand=False)
    pairs = zip(one.parameters(), other.parameters())
    difference = max((a - b).abs().max().item() for a, b in pairs)
    text = f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss:.4f}, "
    text += f"the weights differ by {difference:.1e} at most"
    dist.barrier()  # no rank leaves while another one still sends
    gc.collect()  # DDP has to be gone before its group, or gloo may hang or abort at the end
    dist.destroy_process_group()
    if not difference <= CLOSE:
        sys.exit(f"{text}; expected {CLOSE:.0e}")
    print(text, flush=True)


if __name__ == "__main__":
    main()
