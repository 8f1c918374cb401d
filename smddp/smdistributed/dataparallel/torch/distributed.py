"""Collectives with the names of SMDDP's PyTorch API 1.0.0, on torch.distributed.

Where that API's document is silent or contradicts itself, a function does what the one of the same
name in torch.distributed does. Nothing here is faster than torch.distributed.
"""

from __future__ import annotations

import atexit
import enum
import gc
import os
import time
from collections.abc import Sequence
from typing import Any

from smdistributed.dataparallel.torch.average import Average, divide

import torch
import torch.distributed as dist


class ReduceOp(enum.Enum):
    """How all_reduce combines the ranks' tensors."""

    SUM = "SUM"
    AVERAGE = "AVERAGE"
    MIN = "MIN"
    MAX = "MAX"


class group(enum.Enum):
    """The process groups there are: WORLD, all ranks of the job."""

    WORLD = "WORLD"


def is_available() -> bool:
    """Tell whether this process was started as a rank of a distributed job."""
    return dist.is_available() and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Join the job's process group: with gloo on CPU, with nccl where there are GPUs.

    Arguments are those of torch.distributed.init_process_group; none is needed. `group` may be
    given, too, and has to be WORLD.
    """
    _only_world(kwargs.pop("group", None))
    if not args and "backend" not in kwargs:
        kwargs["backend"] = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(*args, **kwargs)
    atexit.register(_let_gloo_finish)


def is_initialized() -> bool:
    """Tell whether the process group has been joined."""
    return dist.is_available() and bool(dist.is_initialized())


def get_world_size(group: Any = group.WORLD) -> int:
    """Return the number of ranks of the job."""
    require(group)
    return int(dist.get_world_size())


def get_rank(group: Any = group.WORLD) -> int:
    """Return this process's rank, from 0 to the world size - 1."""
    require(group)
    return int(dist.get_rank())


def get_local_rank() -> int:
    """Return this process's rank among those of its host."""
    require()
    if "LOCAL_RANK" not in os.environ:
        raise RuntimeError(
            "LOCAL_RANK is not set; expected a script that torchrun or sm-launch started."
        )
    return int(os.environ["LOCAL_RANK"])


def all_reduce(
    tensor: Any,
    op: ReduceOp | None = ReduceOp.SUM,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Combine the ranks' tensors in place; return a handle if async_op, else None.

    An average is the sum divided by the number of ranks, on every backend: gloo knows no other.
    Raises ValueError for an average of whole numbers, which would have to be rounded.
    """
    require(group)
    if op is None:
        op = ReduceOp.SUM
    if not isinstance(op, ReduceOp):
        names = ", ".join(f"ReduceOp.{name}" for name in ReduceOp.__members__)
        raise ValueError(f"op is {op!r}; expected one of smdistributed's own: {names}.")
    if op is not ReduceOp.AVERAGE:
        return dist.all_reduce(tensor, getattr(dist.ReduceOp, op.name), async_op=async_op)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"all_reduce cannot average a tensor of {tensor.dtype}; "
            "expected floating-point numbers (or use ReduceOp.SUM and divide as you like)."
        )
    work = dist.all_reduce(tensor, dist.ReduceOp.SUM, async_op=async_op)
    if work is not None:
        return Average(work, tensor)
    divide(tensor)
    return None


def broadcast(tensor: Any, src: int = 0, group: Any = group.WORLD, async_op: bool = False) -> Any:
    """Give src's tensor to all ranks, in place; return a handle if async_op, else None."""
    require(group)
    if not 0 <= src < dist.get_world_size():  # gloo ends in an error of its own, in C++
        raise ValueError(f"src is {src}; expected a rank from 0 to {dist.get_world_size() - 1}.")
    return dist.broadcast(tensor, src, async_op=async_op)


def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Any = group.WORLD, async_op: bool = False
) -> Any:
    """Write rank i's tensor to tensor_list[i], on all ranks; return a handle if async_op."""
    require(group)
    return dist.all_gather(tensor_list, tensor, async_op=async_op)


def all_to_all_single(
    output_t: Any,
    input_t: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Send the i-th part of input_t to rank i, and write what rank i sends to output_t's i-th part.

    Parts are of the first dimension, and equal if no sizes are given. Return a handle if async_op.
    Raises ValueError for tensors that cannot be divided like that.
    """
    require(group)
    _require_parts("input_t", input_t, "input_split_sizes", input_split_sizes)
    _require_parts("output_t", output_t, "output_split_sizes", output_split_sizes)
    if input_t.dtype != output_t.dtype or input_t.device != output_t.device:
        raise ValueError(
            f"input_t is of {input_t.dtype} on {input_t.device}, output_t of {output_t.dtype} "
            f"on {output_t.device}; expected the same."
        )
    equal_parts = input_split_sizes is None and output_split_sizes is None
    first = 0 if equal_parts else 1  # the dimension from which on they have to agree
    if input_t.shape[first:] != output_t.shape[first:]:
        expected = "the same" if equal_parts else "them to differ in the first dimension only"
        raise ValueError(
            f"input_t has the shape {tuple(input_t.shape)}, output_t {tuple(output_t.shape)}; "
            f"expected {expected}."
        )
    sizes = [
        None if each is None else list(each) for each in (output_split_sizes, input_split_sizes)
    ]
    return dist.all_to_all_single(output_t, input_t, *sizes, async_op=async_op)


def barrier(group: Any = group.WORLD, async_op: bool = False) -> Any:
    """Wait for all ranks; return a handle in place of that if async_op."""
    require(group)
    return dist.barrier(async_op=async_op)


def require(of: Any = None) -> None:
    """Raise an error without a process group (RuntimeError), or for another than WORLD."""
    if not is_initialized():
        raise RuntimeError("there is no process group yet; call init_process_group() first.")
    _only_world(of)


def _only_world(of: Any) -> None:
    # torch.distributed takes None and its own name for the same group.
    if of is None or of is group.WORLD or (dist.is_initialized() and of is dist.group.WORLD):
        return
    raise ValueError(
        f"the process group is {of!r}; expected group.WORLD, "
        "the only one that smdistributed.dataparallel has (torch.distributed has others)."
    )


def _require_parts(name: str, tensor: Any, sizes_name: str, sizes: Sequence[int] | None) -> None:
    """Raise ValueError unless a tensor has a part for each rank."""
    ranks = dist.get_world_size()
    shape = tuple(tensor.shape)
    if not shape:
        raise ValueError(f"{name} is a single number; expected at least one dimension.")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; expected {name}.contiguous().")
    if sizes is None:
        if shape[0] % ranks:
            raise ValueError(
                f"{name} has the shape {shape}; expected a first dimension that {ranks} ranks "
                f"can divide, or {sizes_name}."
            )
    elif len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != shape[0]:
        raise ValueError(
            f"{sizes_name} is {list(sizes)}; expected {ranks} sizes, one for each rank, that add "
            f"up to {shape[0]}, the first dimension of {name}."
        )


def _let_gloo_finish() -> None:
    """Give gloo's threads time to free their last tensors while there is still a Python.

    One that does so later aborts the process (seen with torch 2.4), and this API has no
    call for leaving the group. torch's own would wait for other ranks after a failure.
    """
    if is_initialized():
        gc.collect()
        time.sleep(0.1)  # without Python's lock, which they need
