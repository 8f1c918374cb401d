"""An open implementation of the PyTorch API 1.0.0 of SMDDP, on torch.distributed.

SMDDP is SageMaker's distributed data parallel library, which is closed. The launcher puts this
folder on the ranks' path with --launcher-smddp-compat true, and only where AWS's own is missing.
"""

from smdistributed.dataparallel.torch.distributed import get_local_rank, get_rank, get_world_size

__all__ = ["get_local_rank", "get_rank", "get_world_size"]
