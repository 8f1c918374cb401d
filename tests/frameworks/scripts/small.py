"""A model and data for it, the same for everybody who asks."""

import gc
import hashlib
import time

import torch


def digest(model):
    """Return a hash of all weights, bit for bit."""
    weights = b"".join(
        tensor.detach().contiguous().numpy().tobytes() for tensor in model.state_dict().values()
    )
    return hashlib.sha256(weights).hexdigest()


def points(count=64):
    """Return a data set of made-up points and classes, as many as asked for."""
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.rand(count, 4, generator=generator), torch.arange(count) % 2
    )


def network():
    """Return a small model; its weights are always the same."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def leave_group():
    """Destroy the process group as train_scripts/checkpoints.py does, and for the same reason."""
    gc.collect()
    time.sleep(0.1)
    torch.distributed.destroy_process_group()
