"""A job of eight ranks that always moves.

Ranks are not equally fast, wait late for what they have begun early, make groups of some of them,
and send to their neighbours.
"""

import time

import torch
import torch.distributed as dist

SECONDS = 40


def steps():
    """Yield steps until SECONDS have passed on each rank."""
    end, left, step = time.monotonic() + SECONDS, torch.ones(1), 0
    while left.item() > 0:
        yield step
        step += 1
        left = torch.tensor([end - time.monotonic()])
        dist.all_reduce(left, dist.ReduceOp.MAX)


def main():
    dist.init_process_group("gloo")
    me, size = dist.get_rank(), dist.get_world_size()
    neighbours = (dist.isend, (me + 1) % size), (dist.irecv, (me - 1) % size)
    halves = dist.new_subgroups(size // 2)[0]
    for step in steps():
        handles = [dist.all_reduce(torch.ones(64), async_op=True) for _ in range(20)]
        some = dist.new_group([rank for rank in range(size) if rank % 3 == step % 3])
        if me % 3 == step % 3:
            time.sleep(0.3)
            dist.all_reduce(torch.ones(1), group=some)
            dist.destroy_process_group(some)
        for _ in range(4):  # as a pipeline does, whose stages are unequal
            time.sleep(0.02 * me)
            sent = [dist.P2POp(how, torch.ones(8), other) for how, other in neighbours]
            for handle in dist.batch_isend_irecv(sent):
                handle.wait()
            gathered = [torch.ones(8) for _ in range(size // 2)]
            dist.all_gather(gathered, torch.ones(8), group=halves)  # as a model that is sharded
        if me == step % size:
            time.sleep(1)  # an evaluation
        for handle in handles:
            handle.wait()
        dist.broadcast_object_list([step, None], src=step % size)
    print("all steps done", flush=True)
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
