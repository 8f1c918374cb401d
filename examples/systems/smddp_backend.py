"""Train with DistributedDataParallel and the backend "smddp" of torch.distributed.

One process:            sm-launch --launcher-smddp-compat --train-script smddp_backend.py
One host, 2 processes:  the same with --launcher-nproc-per-node 2
Several hosts, on each: the same; SageMaker sets SM_HOSTS and SM_CURRENT_HOST

SMDDP needs one import and the backend's name; all else is plain PyTorch. The backend is AWS's where
that is installed, else gloo on CPU and nccl on GPUs. The data are points on a line; the script ends
with an error if the model has not found that line.
"""

import gc
import os
import sys

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  (makes the backend known)
import torch
import torch.distributed as dist
from torch import nn


def train():
    """Return the line that the model has found, as [slope, intercept]."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # each rank has data of its own
    x = torch.randn(64, 1, device=device)
    y = 3 * x - 2
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return [model.module.weight.item(), model.module.bias.item()]


def main():
    dist.init_process_group(backend="smddp")
    slope, intercept = train()
    if dist.get_rank() == 0:
        print(
            f"backend={dist.get_backend()} ranks={dist.get_world_size()} "
            f"y = {slope:.3f} x + {intercept:.3f}",
            flush=True,
        )
    gc.collect()  # DDP has to be gone before its group, or gloo may hang or abort at the end
    dist.destroy_process_group()
    if abs(slope - 3) > 0.01 or abs(intercept + 2) > 0.01:
        sys.exit(f"found {slope} and {intercept}; expected 3 and -2")


if __name__ == "__main__":
    main()
