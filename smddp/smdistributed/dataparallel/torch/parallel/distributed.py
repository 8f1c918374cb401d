"""DistributedDataParallel with the parameters of SMDDP's PyTorch API 1.0.0."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from smdistributed.dataparallel.torch.distributed import require

from torch.nn import parallel


class DistributedDataParallel(parallel.DistributedDataParallel):  # type: ignore[misc]
    """torch's own, with SMDDP's parameters: it has no others, and one process group.

    SMDDP cannot broadcast buffers and asks for broadcast_buffers=False, but has True as its
    default, so scripts leave it; here it does what it says, as in torch. The buffers of a model
    that has some (BatchNorm's) are then the same on all ranks.
    """

    def __init__(
        self,
        module: Any,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: int | None = None,
    ) -> None:
        require(process_group)
        with warnings.catch_warnings():
            # torch 2.13 has another name for it, which is not SMDDP's.
            warnings.filterwarnings("ignore", ".*broadcast_buffers.* is deprecated", FutureWarning)
            super().__init__(
                module,
                device_ids=device_ids,
                output_device=output_device,
                broadcast_buffers=broadcast_buffers,
                bucket_cap_mb=bucket_cap_mb,
            )
