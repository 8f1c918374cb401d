"""Train with DistributedDataParallel on Trainium: torch_xla's backend and its device.

One host, 2 processes:  torchrun --nproc-per-node 2 trainium.py
Several hosts, on each: sm-launch --train-script trainium.py

It needs torch_xla, which torch-neuronx brings. The launcher starts a process for each Neuron core.
The data are points on a line; the script ends with an error if the model has not found that line.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    import torch_xla
    import torch_xla.distributed.xla_backend  # makes the backend known
except ImportError as error:
    sys.exit(f"torch_xla is not installed here ({error}); torch-neuronx brings it")


def train(device):
    """Return the line that the model has found, as [slope, intercept]."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1).to(device)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # each rank has data of its own
    x = torch.randn(64, 1).to(device)
    y = 3 * x - 2
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp_model(x), y).backward()
        optimizer.step()
        torch_xla.sync()  # runs the step, which has only been recorded so far
    return [model.weight.item(), model.bias.item()]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("xla")
    else:
        dist.init_process_group("xla", store=dist.HashStore(), rank=0, world_size=1)
    slope, intercept = train(torch_xla.device())
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks={ranks} y = {slope:.3f} x + {intercept:.3f}", flush=True)
    gc.collect()  # DDP has to be gone before its group
    dist.destroy_process_group()
    if abs(slope - 3) > 0.01 or abs(intercept + 2) > 0.01:
        sys.exit(f"found {slope} and {intercept}; expected 3 and -2")


if __name__ == "__main__":
    main()
