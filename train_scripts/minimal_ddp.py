"""The smallest correct script for any number of hosts: a model learns the arms of a spiral.

One process:        python minimal_ddp.py
One host:           torchrun --nproc-per-node 2 minimal_ddp.py
One or more hosts:  sm-launch --train-script minimal_ddp.py

train_ddp.py is the same with options, checkpoints and a stop that saves.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(device):
    torch.manual_seed(0)  # all ranks have the same data and start from the same weights
    points = torch.rand(8192, 2) * 4 - 2
    angle = torch.atan2(points[:, 1], points[:, 0]) + 2 * points.norm(dim=1)
    dataset = TensorDataset(points, (torch.sin(angle) > 0).long())
    sampler = DistributedSampler(dataset)  # gives each rank its own part of the data
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    layers = (nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = nn.Sequential(*layers).to(device)
    ddp_model = DistributedDataParallel(model)  # averages the gradients of all ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        for points, labels in loader:
            loss = nn.functional.cross_entropy(ddp_model(points.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch={epoch} loss={loss:.4f} (rank 0's last batch)", flush=True)
    return model


if __name__ == "__main__":
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, backend = torch.device("cpu"), "gloo"
    if enough_gpus:
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun's variables
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = train(device)
    if dist.get_rank() == 0:
        folder = os.environ.get("SM_MODEL_DIR", ".")
        os.makedirs(folder, exist_ok=True)
        torch.save(model.cpu().state_dict(), os.path.join(folder, "model.pt"))
    gc.collect()  # frees ddp_model: if it outlives its group, gloo may abort the process at exit
    dist.destroy_process_group()
