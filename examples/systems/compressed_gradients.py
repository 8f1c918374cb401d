"""DistributedDataParallel sends gradients in fewer bytes: faster where the network is slow.

One process:            python compressed_gradients.py
One host, 2 processes:  torchrun --nproc-per-node 2 compressed_gradients.py --compress powersgd
Several hosts, on each: sm-launch --train-script compressed_gradients.py --compress bf16

fp16 and bf16 halve the gradients; bf16 cannot overflow. PowerSGD sends an M x N gradient as two
matrices of rank 2, and carries what it left out over to the next step. The model and the data are
those of minimal_ddp.py.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

PLAIN_STEPS = 100  # that PowerSGD leaves as they are: early gradients change too fast for it


def compress(ddp_model, method):
    """Have a DistributedDataParallel model compress gradients; all ranks add up the same numbers.

    PowerSGD remembers on each rank what it has not sent yet: a checkpoint would have to keep it, as
    large as the gradients, for every rank. A job that resumes without it begins with plain steps.
    """
    if method == "fp16":
        ddp_model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "bf16":
        # A torch built without CUDA refuses this hook by its name, though gloo adds up bf16.
        hook = default_hooks.bf16_compress_hook
        ddp_model.register_comm_hook(None, lambda group, bucket: hook(group, bucket))
    elif method == "powersgd":
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": PLAIN_STEPS}
        state = powerSGD_hook.PowerSGDState(None, **options)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def train(method, device):
    """Return how much of the spiral the model knows in the end; half of it is chance."""
    torch.manual_seed(0)  # the same data and the same first weights on all ranks
    points = (torch.rand(8192, 2) * 4 - 2).to(device)
    angle = torch.atan2(points[:, 1], points[:, 0]) + 2 * points.norm(dim=1)
    labels = (torch.sin(angle) > 0).long()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    layers = (nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    compress(model, method)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(4):
        order = torch.randperm(len(points))[mine].split(64)
        for batch in order:
            loss = nn.functional.cross_entropy(model(points[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return (model(points).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compress", choices=["none", "fp16", "bf16", "powersgd"], default="none")
    args = parser.parse_args()
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    accuracy = train(args.compress, device)
    if dist.get_rank() == 0:
        print(f"compress={args.compress} accuracy={accuracy:.4f}", flush=True)
    gc.collect()  # DDP has to be gone before its group, or gloo may hang or abort at the end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
