"""What a Horovod script does, with DistributedDataParallel: for torchrun or the launcher."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train():
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(5, 1))  # broadcasts rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * dist.get_world_size())
    for _ in range(100):
        inputs = torch.randn(32, 5)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # averages the gradients, which DistributedOptimizer's step does there
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f} on rank 0 of {dist.get_world_size()}")


dist.init_process_group("gloo")  # nccl on GPUs
train()
gc.collect()  # DDP has to be gone before its group, or gloo may hang or abort at the end
dist.destroy_process_group()
