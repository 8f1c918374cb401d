"""DistributedDataParallel, which SMDDP's document imports from here and from `.distributed`."""

from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
