"""A job of eight ranks that shares its work in every way, one after another, and always moves.

Ranks are not equally fast, wait late for what they have begun early, and make groups of some of
them.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SECONDS = 6  # of each part


def until_all_have_enough():
    """Yield until SECONDS have passed on each rank."""
    end = time.monotonic() + SECONDS
    left = torch.ones(1)
    while left.item() > 0:
        yield
        left = torch.tensor([end - time.monotonic()])
        dist.all_reduce(left, dist.ReduceOp.MAX)


class Slow(nn.Module):
    """A layer that takes its time: unequal stages of a pipeline."""

    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


def pipeline(mesh):
    """1F1B, whose stages the ranks of each `pp` group are; the model is sharded by `dp`."""
    group = mesh["pp"].get_group()
    number, count = dist.get_rank(group), dist.get_world_size(group)
    module = nn.Sequential(*parallel_layers(mesh), Slow(0.02 * number))
    if mesh["dp"].size() > 1:
        fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(module, number, count, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 8, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(16, 8)
    for _ in until_all_have_enough():
        arguments = [batch] if number == 0 else []
        target = {"target": batch, "losses": []} if number == count - 1 else {}
        schedule.step(*arguments, **target)


def parallel_layers(mesh):
    """Return two layers that the ranks of each `tp` group share."""
    layers = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return [parallelize_module(layers, mesh["tp"], plan)] if mesh["tp"].size() > 1 else [layers]


def shard(wrap):
    """Train what wrap() has sharded; each rank is slow in its turn."""
    model = wrap(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, _ in enumerate(until_all_have_enough()):
        if step % dist.get_world_size() == dist.get_rank():
            time.sleep(0.5)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(model, **how):
    for layer in model:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def early_and_late():
    """Begin collectives early and wait for them late; groups of some, of few steps each."""
    me, size = dist.get_rank(), dist.get_world_size()
    for step, _ in enumerate(until_all_have_enough()):
        handles = [dist.all_reduce(torch.ones(64), async_op=True) for _ in range(20)]
        some = dist.new_group([rank for rank in range(size) if rank % 3 == step % 3])
        if me % 3 == step % 3:
            time.sleep(0.3)
            dist.all_reduce(torch.ones(1), group=some)
            dist.destroy_process_group(some)
        if me == step % size:
            time.sleep(1)  # an evaluation
        for handle in handles:
            handle.wait()
        dist.broadcast_object_list([step, None], src=step % size)


def main():
    dist.init_process_group("gloo")
    hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    for sizes in (1, 1, 8), (2, 2, 2):
        pipeline(init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "pp")))
    shard(sharded)
    shard(lambda model: sharded(model, mesh=hybrid))
    early_and_late()
    dist.barrier()
    print("all parts done", flush=True)
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
