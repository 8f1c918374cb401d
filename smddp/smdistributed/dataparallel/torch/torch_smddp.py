"""Importing this makes "smddp" a backend of torch.distributed: gloo on CPU, nccl with GPUs.

import smdistributed.dataparallel.torch.torch_smddp
torch.distributed.init_process_group(backend="smddp")
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ON_GPU = torch.cuda.is_available()


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a rank's end of a new group; its ranks count from 0."""
    if _ON_GPU:
        return dist.ProcessGroupNCCL(store, rank, size, timeout=timeout)
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


# Of one device: torch sends objects by way of the CPU where a backend has it, and nccl has not.
dist.Backend.register_backend("smddp", _create, devices=["cuda" if _ON_GPU else "cpu"])
