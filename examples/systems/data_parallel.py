"""Train with DataParallel: one process for all GPUs of a host. And beside it with DDP.

DataParallel, one process:     python data_parallel.py
DDP, a process for each GPU:   torchrun --nproc-per-node 2 data_parallel.py
DDP on several hosts, on each: sm-launch --train-script data_parallel.py

Both cut each batch into parts, one for each device, and must end with the weights that one device
gets with the whole batch; the script checks that. Without GPUs DataParallel is the plain module: it
hands over the whole batch, and nothing runs in parallel.

Prefer DDP, as torch's own documentation of DataParallel does: DataParallel's threads share one
process and its GIL, it copies the model to all GPUs in every step, gathers the outputs on the first
one, which needs the most memory, and is for one host.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS, BATCH, LR = 50, 48, 0.05
CLOSE = 1e-4 if torch.cuda.is_available() else 1e-6  # CUDA's matrix products may use TF32


def train(model: nn.Module, batches: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Train on each batch, and average gradients if the model does."""
    for batch in batches:
        optimizer.zero_grad()
        target = batch.sum(dim=1, keepdim=True).sin()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()


def new_model(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that is the same in every process, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def main() -> None:
    """Train in parallel and on one device, and compare."""
    gpus = torch.cuda.device_count()
    local_rank, rank, count = (
        int(os.environ.get(name, default))
        for name, default in (("LOCAL_RANK", 0), ("RANK", 0), ("WORLD_SIZE", 1))
    )
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    plain, optimizer = new_model(device)
    batches = torch.randn(STEPS, BATCH * count, 5, device=device)
    train(plain, batches, optimizer)

    model, optimizer = new_model(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpus else "gloo")
        # This rank's part.
        train(nn.parallel.DistributedDataParallel(model), batches[:, rank::count], optimizer)
        dist.barrier()
        gc.collect()  # DDP has to be gone before its group, or gloo may hang or abort at the end
        dist.destroy_process_group()
        text = f"rank {rank}: DistributedDataParallel with {count} process(es)"
    else:
        train(nn.DataParallel(model), batches, optimizer)  # its parts are on all GPUs
        text = f"DataParallel with {gpus} GPUs"
        text += "" if gpus else ", which is the plain module: nothing runs in parallel"
    pairs = zip(plain.parameters(), model.parameters())
    difference = max((a - b).abs().max().item() for a, b in pairs)
    text += f"; its weights differ from those of one device by {difference:.1e}"
    if not difference <= CLOSE:
        sys.exit(f"{text}; expected {CLOSE:.0e} at most")
    print(text, flush=True)


if __name__ == "__main__":
    main()
