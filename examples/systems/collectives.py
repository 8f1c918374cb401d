"""How ranks exchange values with torch.distributed: send, broadcast, gather, and the mean of all.

One host:       torchrun --nproc-per-node 6 collectives.py
Several hosts:  sm-launch --train-script collectives.py --launcher-nproc-per-node 2

The first lesson of MPI, without MPI; mpi_collectives.py is its twin with mpi4py. It needs torch
alone. Every rank checks what it gets; if that is wrong, a line says so and the job ends with 1.
"""

import os
import sys

import torch
import torch.distributed as dist


def point_to_point(rank):
    """Rank 0 sends a tensor to rank 1; the other ranks do nothing."""
    if rank == 0:
        dist.send(torch.arange(3), dst=1)
    elif rank == 1:
        data = torch.empty(3, dtype=torch.int64)
        dist.recv(data, src=0)
        check("what rank 0 sent", data, torch.arange(3))


def broadcast(rank):
    """Rank 0 gives a tensor to all ranks."""
    data = torch.arange(10) if rank == 0 else torch.empty(10, dtype=torch.int64)
    dist.broadcast(data, src=0)
    check("what rank 0 broadcast", data, torch.arange(10))


def mean(rank, size):
    """Rank 0 gathers a tensor from every rank and gives their mean to all.

    So weights or gradients are averaged by hand; dist.all_reduce() does it in one call.
    """
    mine = torch.full((10,), float(rank))
    gathered = [torch.empty(10) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    if rank == 0:
        for other, data in enumerate(gathered):
            check(f"what rank {other} gave", data, torch.full((10,), float(other)))
        average = torch.stack(gathered).mean(dim=0)
    else:
        average = torch.empty(10)
    dist.broadcast(average, src=0)
    check("the mean", average, torch.full((10,), (size - 1) / 2))


def check(what, data, expected):
    if not torch.equal(data, expected):
        values = f"{data.tolist()}; expected {expected.tolist()}"
        sys.exit(f"rank {dist.get_rank()}: {what} is {values}")


def main():
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        start = "torchrun --nproc-per-node 2 collectives.py"
        sys.exit(f"collectives.py needs two ranks or more: {start}")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    point_to_point(rank)
    broadcast(rank)
    mean(rank, size)
    print(f"rank {rank} of {size}: every value is right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
