"""In a child process: imports torch and prints what it has, a JSON object a line.

Executed as text (`python -c`), since the launcher itself may be an archive. It imports nothing of
the launcher's. What may hang comes last: a line that was printed counts.
"""

import json


def say(**found: object) -> None:
    """Print what was found."""
    print("\n" + json.dumps(found), flush=True)


def look_at_torch() -> None:
    """Print the version, then the backends, then what CUDA has."""
    try:
        import torch
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        say(missing=missing, problem=f"{type(error).__name__}: {error}")
        return
    cuda = getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None) or ""
    say(version=str(torch.__version__), cuda=cuda)
    import torch.distributed as dist

    if not dist.is_available():
        say(distributed=False)
        return
    have = {
        name: getattr(dist, f"is_{name}_available", lambda: False)()
        for name in ("nccl", "gloo", "mpi")
    }
    say(backends=[name for name, there in have.items() if there])
    if have["nccl"]:
        say(nccl=".".join(map(str, torch.cuda.nccl.version())))
    if not cuda:
        return
    try:
        say(devices=torch.cuda.device_count())
        torch.cuda.init()
    except Exception as error:
        say(cuda_problem=str(error))


if __name__ == "__main__":
    look_at_torch()
