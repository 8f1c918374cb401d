"""The calls of SMDDP's PyTorch API, each with what its document says of it: run on 4 ranks.

`python smddp_calls.py NAME ...`, as a rank, runs the functions of these names in this order; it
raises or exits with 0. Functions that do not join the process group are for after one that does.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

# As the launcher has it in PYTHONPATH.
sys.path.append(str(Path(__file__).resolve().parents[1] / "smddp"))

import smdistributed.dataparallel.torch
import smdistributed.dataparallel.torch.distributed as smddp
import torch
import torch.distributed as dist
from smdistributed.dataparallel.torch.distributed import ReduceOp, group
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel as FromParallel
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP
from torch import nn

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def refused(kind, call, *args, **named) -> str:
    """Return what an error says that has to be of this kind, and one line."""
    try:
        call(*args, **named)
    except kind as error:
        assert "\n" not in str(error), error
        return str(error)
    raise AssertionError(f"{call} took {args} {named}")


def lifecycle():
    assert smddp.is_available() is True
    assert smddp.is_initialized() is False
    assert smddp.init_process_group() is None
    assert smddp.is_initialized() is True
    assert smddp.get_world_size() == smddp.get_world_size(group=group.WORLD) == 4
    assert smddp.get_rank() == smddp.get_rank(group.WORLD) == RANK
    assert smddp.get_local_rank() == int(os.environ["LOCAL_RANK"])
    # The document has these names, too.
    package = smdistributed.dataparallel.torch
    seen = package.get_world_size(), package.get_rank(), package.get_local_rank()
    assert seen == (4, RANK, smddp.get_local_rank())
    assert dist.get_backend() == "gloo"
    refused(ValueError, smddp.init_process_group)  # twice, as in torch


def calls():
    """Return all calls that take a group, each with other arguments for it."""
    tensors = [torch.zeros(4) for _ in range(RANKS + 1)]
    return {
        smddp.get_world_size: (),
        smddp.get_rank: (),
        smddp.all_reduce: (tensors[0],),
        smddp.broadcast: (tensors[0],),
        smddp.all_gather: (tensors[1:], tensors[0]),
        smddp.all_to_all_single: (tensors[1], tensors[0]),
        smddp.barrier: (),
    }


def before_init():
    for call, args in {**calls(), smddp.get_local_rank: (), DDP: (nn.Linear(1, 1),)}.items():
        assert "call init_process_group() first" in refused(RuntimeError, call, *args)
    assert "group.WORLD" in refused(ValueError, smddp.init_process_group, group=dist)


def all_reduce():
    mine = torch.tensor([1.0 + RANK, 10.0 * RANK, -1.5])
    expected = {
        ReduceOp.SUM: [10.0, 60.0, -6.0],
        None: [10.0, 60.0, -6.0],
        ReduceOp.MIN: [1.0, 0.0, -1.5],
        ReduceOp.MAX: [4.0, 30.0, -1.5],
        ReduceOp.AVERAGE: [2.5, 15.0, -1.5],
    }
    for op, values in expected.items():
        tensor = mine.clone()
        assert smddp.all_reduce(tensor, op) is None
        assert tensor.tolist() == values, op
        tensor = mine.clone()
        handle = smddp.all_reduce(tensor, op=op, group=group.WORLD, async_op=True)
        assert handle.wait() is True
        assert handle.is_completed() is True
        handle.wait()  # divides no second time
        assert tensor.tolist() == values, op


def averages():
    """An average on each way by which a handle's end can be seen, and of other kinds of numbers."""
    tensor = torch.full((3,), float(RANK))
    handle = smddp.all_reduce(tensor, ReduceOp.AVERAGE, async_op=True)
    while not handle.is_completed():
        pass
    assert tensor.tolist() == [1.5] * 3
    tensor = torch.full((3,), float(RANK))
    handle = smddp.all_reduce(tensor, ReduceOp.AVERAGE, async_op=True)
    assert handle.get_future().wait()[0].tolist() == [1.5] * 3
    handle.wait(timedelta(seconds=60))
    assert tensor.tolist() == [1.5] * 3
    for dtype in (torch.float16, torch.float64, torch.complex64):
        tensor = torch.full((2,), float(RANK), dtype=dtype)
        smddp.all_reduce(tensor, ReduceOp.AVERAGE)
        assert tensor.tolist() == [1.5] * 2
    parameter = nn.Parameter(torch.full((2,), float(RANK)))
    smddp.all_reduce(parameter, ReduceOp.AVERAGE)
    assert parameter.tolist() == [1.5] * 2
    assert parameter.requires_grad and parameter.is_leaf
    # Whole numbers are added up, but not averaged.
    whole = torch.tensor([RANK])
    text = refused(ValueError, smddp.all_reduce, whole, ReduceOp.AVERAGE)
    assert "torch.int64" in text and "ReduceOp.SUM" in text
    smddp.all_reduce(whole)
    assert whole.item() == 6


def reduce_op():
    assert [op.name for op in ReduceOp] == ["SUM", "AVERAGE", "MIN", "MAX"]
    for op in ("sum", 1, dist.ReduceOp.SUM):
        text = refused(ValueError, smddp.all_reduce, torch.zeros(1), op)
        assert "ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX" in text


def broadcast():
    tensor = torch.full((4,), float(RANK))
    assert smddp.broadcast(tensor) is None
    assert tensor.tolist() == [0.0] * 4
    tensor = torch.full((2, 3), float(RANK))  # of any size, whatever the document says
    assert smddp.broadcast(tensor, src=2, group=group.WORLD, async_op=True).wait() is True
    assert tensor.tolist() == [[2.0] * 3] * 2
    for src in (4, -1):
        text = refused(ValueError, smddp.broadcast, tensor, src)
        assert f"src is {src}; expected a rank from 0 to 3" in text


def all_gather():
    for more in ({}, {"group": group.WORLD, "async_op": True}):
        tensors = [torch.empty(2, dtype=torch.int64) for _ in range(RANKS)]
        handle = smddp.all_gather(tensors, torch.tensor([RANK, 10 * RANK]), **more)
        assert handle.wait() is True if more else handle is None
        assert [tensor.tolist() for tensor in tensors] == [[0, 0], [1, 10], [2, 20], [3, 30]]


def all_to_all_single():
    for more in ({}, {"group": group.WORLD, "async_op": True}):
        # Rank r sends 10 * r + i to rank i, each a row of two.
        sent = torch.tensor([[10 * RANK + i] * 2 for i in range(RANKS)])
        got = torch.empty_like(sent)
        handle = smddp.all_to_all_single(got, sent, **more)
        assert handle.wait() is True if more else handle is None
        assert got.tolist() == [[10 * i + RANK] * 2 for i in range(RANKS)]
        # It sends i numbers to rank i, so rank 0 gets none; by name, as the document has it.
        sizes = list(range(RANKS))
        sent = torch.full((sum(sizes),), RANK)
        got = torch.empty(RANK * RANKS, dtype=torch.int64)
        handle = smddp.all_to_all_single(
            output_t=got,
            input_t=sent,
            output_split_sizes=[RANK] * RANKS,
            input_split_sizes=tuple(sizes),
            **more,
        )
        assert handle.wait() is True if more else handle is None
        assert got.tolist() == [i for i in range(RANKS) for _ in range(RANK)]


def shapes():
    good = torch.zeros(4)
    for output, given, sizes, expected in (
        (torch.zeros(5), good, (), "output_t has the shape (5,); expected a first dimension"),
        (good, torch.tensor(1.0), (), "input_t is a single number"),
        (torch.zeros(4, 2).t(), torch.zeros(4, 2), (), "output_t is not contiguous"),
        (torch.zeros(4, 2), torch.zeros(4, 3), (), "(4, 3), output_t (4, 2); expected the same"),
        (torch.zeros(8), good, (), "input_t has the shape (4,), output_t (8,); expected the same"),
        (torch.zeros(4, 2), good, ([1] * 4,), "expected them to differ in the first dimension"),
        (good, good.double(), (), "input_t is of torch.float64 on cpu, output_t of torch.float32"),
        (good, good, (None, [4]), "input_split_sizes is [4]; expected 4 sizes"),
        (good, good, ([1, 1, 1, 2], None), "output_split_sizes is [1, 1, 1, 2]; expected 4 sizes"),
        (good, good, (None, [5, -1, 0, 0]), "input_split_sizes is [5, -1, 0, 0]"),
    ):
        text = refused(ValueError, smddp.all_to_all_single, output, given, *sizes)
        assert expected in text, text
    smddp.barrier()  # nobody was left behind


def barrier():
    assert smddp.barrier() is None
    assert smddp.barrier(group=group.WORLD, async_op=True).wait() is True


def groups():
    """Groups other than WORLD are refused everywhere; None and torch's own WORLD are WORLD."""
    pair = dist.new_group([0, 1])
    for call, args in calls().items():
        for other in (pair, "WORLD", 0):
            text = refused(ValueError, call, *args, group=other)
            assert "expected group.WORLD" in text
        for world in (group.WORLD, None, dist.group.WORLD):
            call(*args, group=world)
    text = refused(ValueError, DDP, nn.Linear(1, 1), process_group=pair)
    assert "expected group.WORLD" in text
    DDP(nn.Linear(1, 1), process_group=group.WORLD)


def data_parallel():
    """Gradients are the mean of the ranks'; rank 0's model is everybody's."""
    assert FromParallel is DDP and issubclass(DDP, nn.parallel.DistributedDataParallel)
    for more in ({}, {"device_ids": None, "output_device": None, "bucket_cap_mb": 1}):
        torch.manual_seed(RANK)
        model = DDP(nn.Linear(2, 1, bias=False), **more)
        weights = [torch.empty(1, 2) for _ in range(RANKS)]
        smddp.all_gather(weights, model.module.weight.detach())
        assert all(torch.equal(weight, weights[0]) for weight in weights)
        model(torch.full((1, 2), float(RANK))).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
    assert model.broadcast_buffers is True
    assert DDP(nn.Linear(1, 1), broadcast_buffers=False).broadcast_buffers is False
    DDP(nn.Linear(1, 1), [])  # what the document says of models on the CPU
    refused(TypeError, DDP, nn.Linear(1, 1), find_unused_parameters=True)
    text = refused(ValueError, DDP, nn.Linear(1, 1), device_ids=[0])  # torch's own words
    assert "device_ids" in text


def backend():
    """smddp as a backend of torch.distributed: its groups, DDP, and what FSDP needs."""
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    dist.init_process_group(backend="smddp", timeout=timedelta(seconds=60))
    assert dist.get_backend() == "smddp"
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, RANKS)
    tensor = torch.tensor([float(RANK)])
    dist.all_reduce(tensor)
    assert tensor.item() == 6.0
    smddp.all_reduce(tensor, ReduceOp.AVERAGE)  # both APIs in one job
    assert tensor.item() == 6.0
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": rank} for rank in range(RANKS)]
    dist.barrier()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3], backend="smddp")]
    pair = pairs[RANK // 2]
    assert dist.get_backend(pair) == "smddp"
    tensor = torch.tensor([RANK])
    dist.all_reduce(tensor, group=pair)
    assert tensor.item() == (1 if RANK < 2 else 5)

    on_cpu = {"device_id": torch.device("cpu")}
    for wrap, more in ((nn.parallel.DistributedDataParallel, {}), (FSDP, on_cpu)):
        model = wrap(nn.Linear(8, 1), **more)
        model(torch.full((4, 8), float(RANK))).sum().backward()
        total = sum(part.grad.sum() for part in model.parameters())  # of FSDP, this rank's share
        dist.all_reduce(total)
        assert total.item() > 0


def mixed_backend():
    """As AWS's guide has it for FSDP, gloo for CPU, smddp for GPUs; here by the API's own init."""
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    timeout = timedelta(seconds=60)
    smddp.init_process_group("cpu:gloo,cuda:smddp", timeout=timeout, group=group.WORLD)
    tensor = torch.tensor([RANK])
    dist.all_reduce(tensor)
    assert tensor.item() == 6 and "smddp" in dist.get_backend_config()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
    if smddp.is_initialized():
        smddp.barrier()  # the API has no call for leaving
