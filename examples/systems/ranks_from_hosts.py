"""Take the rank from SM_HOSTS, with one process on each host, and average gradients by hand.

One host:                sm-launch --train-script ranks_from_hosts.py --launcher-nproc-per-node 1
Several hosts, on each:  the same command; SageMaker sets SM_HOSTS and SM_CURRENT_HOST

The rank and the number of ranks are given to init_process_group; where the hosts meet comes from
MASTER_ADDR and MASTER_PORT, which the launcher's torchrun sets. Without torchrun a script of this
kind works only in an image that sets both. New scripts should leave the rank to torchrun: then they
can have several processes on a host (train_scripts/minimal_ddp.py).
"""

import argparse
import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn


def arguments() -> argparse.Namespace:
    """Return the arguments; `type=list` would make a list of characters of --hosts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument(
        "--hosts", type=json.loads, default=os.environ.get("SM_HOSTS", '["localhost"]')
    )
    parser.add_argument("--current-host", default=os.environ.get("SM_CURRENT_HOST", "localhost"))
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """End with one line if ranks cannot be told from hosts."""
    problem = ""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.current_host not in args.hosts:
        problem = f"{args.current_host} is not one of {args.hosts}; check SM_CURRENT_HOST"
    elif "MASTER_ADDR" not in os.environ:
        problem = "MASTER_ADDR is not set; start this script with sm-launch or torchrun"
    elif count > 1:
        problem = (
            f"{count} processes run on {args.current_host}, and all of them would be rank "
            f"{args.hosts.index(args.current_host)}; expected one on each host: "
            "--launcher-nproc-per-node 1"
        )
    if problem:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            signal.pause()  # torchrun ends it: one process of a host says why
        sys.exit(f"ranks_from_hosts.py: {problem}")


def train(rank: int, count: int) -> tuple[nn.Module, float, float]:
    """Return the trained model, and the losses of this rank's first and last step."""
    torch.manual_seed(rank)  # each rank has data of its own
    inputs = torch.randn(50, 30, 5)
    targets = inputs @ torch.arange(10.0).reshape(5, 2)
    torch.manual_seed(0)  # and the same weights to begin with
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch, target in zip(inputs, targets):
        loss = nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= count
        optimizer.step()
        losses.append(loss.item())
    return model, losses[0], losses[-1]


def main() -> None:
    """Train; then see that all ranks have the same weights."""
    args = arguments()
    check(args)
    rank, count = args.hosts.index(args.current_host), len(args.hosts)
    dist.init_process_group(args.backend, rank=rank, world_size=count)
    model, first, last = train(rank, count)
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    all_weights = [torch.empty_like(mine) for _ in range(count)]
    dist.all_gather(all_weights, mine)
    dist.barrier()
    dist.destroy_process_group()
    text = f"rank {rank} of {count}: loss {first:.3f} at first, {last:.3f} at last"
    if last >= first or not all(torch.equal(mine, other) for other in all_weights):
        sys.exit(f"{text}; expected a smaller one at last, and the same weights on all ranks")
    print(text, flush=True)


if __name__ == "__main__":
    main()
