"""Gradients that travel between ranks in fewer bytes (--compress). Needs torch alone."""

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

METHODS = ("fp16", "bf16", "powersgd")
PLAIN_STEPS = 100  # that PowerSGD leaves as they are: early gradients change too fast for it
MATRIX_RANK = 2  # PowerSGD sends an M x N gradient as two matrices, M x 2 and N x 2


def compress(ddp_model, method):
    """Have a DistributedDataParallel model compress gradients; all ranks add up the same numbers.

    PowerSGD remembers on each rank what it has not sent yet. This is in no checkpoint: a job that
    resumes begins with plain steps again.
    """
    if method == "fp16":
        ddp_model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "bf16":
        # A torch built without CUDA refuses this hook by its name, though gloo adds up bf16.
        hook = default_hooks.bf16_compress_hook
        ddp_model.register_comm_hook(None, lambda group, bucket: hook(group, bucket))
    elif method == "powersgd":
        options = {"matrix_approximation_rank": MATRIX_RANK, "start_powerSGD_iter": PLAIN_STEPS}
        state = powerSGD_hook.PowerSGDState(None, **options)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
