"""Train with the batches of many ranks: a learning rate that grows with them, and SyncBatchNorm.

One process:            python large_batch.py
One host, 2 processes:  torchrun --nproc-per-node 2 large_batch.py
Several hosts, on each: sm-launch --train-script large_batch.py

With N ranks a step has N times the samples, and the learning rate is N times as large, after a
warm-up over five epochs (Goyal et al., arXiv 1706.02677). On GPUs batch normalization takes its
statistics from all ranks' batches, which helps if each has few; torch has none such for a CPU.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, WARM_UP, LR = 8, 5, 0.05  # the learning rate of one rank


def train(device):
    """Return how much of the spiral the model knows in the end; half of it is chance."""
    torch.manual_seed(0)  # the same data and the same first weights on all ranks
    points = torch.rand(8192, 2) * 4 - 2
    angle = torch.atan2(points[:, 1], points[:, 0]) + 2 * points.norm(dim=1)
    dataset = TensorDataset(points, (torch.sin(angle) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    layers = (nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model = nn.Sequential(*layers, nn.Linear(64, 2))
    if device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device)
    ddp_model = DistributedDataParallel(model)
    ranks = dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * ranks, momentum=0.9)
    schedule = LinearLR(optimizer, start_factor=1 / ranks, total_iters=WARM_UP)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        if dist.get_rank() == 0:
            print(f"epoch={epoch} lr={schedule.get_last_lr()[0]:.4g}", flush=True)
        for points, labels in loader:
            loss = nn.functional.cross_entropy(ddp_model(points.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval()
    points, labels = (part.to(device) for part in dataset.tensors)
    with torch.no_grad():
        return (model(points).argmax(1) == labels).float().mean().item()


def main():
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    accuracy = train(device)
    if dist.get_rank() == 0:
        print(f"accuracy={accuracy:.4f}", flush=True)
    gc.collect()  # DDP has to be gone before its group, or gloo may hang or abort at the end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
