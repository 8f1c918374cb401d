"""In a child process: imports torch, and prints its properties and problems.

Executed by its path, with the number of GPUs; each line is a finding as JSON: its level, the
finding, the fix. An exception is one, too. It imports no module of the launcher.
"""

import json
import re
import sys

import torch
import torch.distributed as dist


def say(level: str, seen: str, to_do: str = "") -> None:
    """Print a finding."""
    print("\n" + json.dumps([level, seen, to_do]), flush=True)


def look_at_torch(gpus: int) -> None:
    """Print torch's version, and any problem for ranks."""
    cuda = getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None) or ""
    seen = f"torch {torch.__version__} for {f'CUDA {cuda}' if cuda else 'CPU'}"
    if not dist.is_available():
        to_do = "install a build of torch with torch.distributed"
        say("problem", f"{seen} has no torch.distributed", to_do)
        return
    known = ("nccl", "gloo", "mpi")
    backends = [name for name in known if getattr(dist, f"is_{name}_available", bool)()]
    nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if "nccl" in backends else ""
    say("ok", f"{seen}{nccl}; backends: {', '.join(backends) or 'none'}")
    if [*map(int, re.findall(r"\d+", torch.__version__)[:2])] < [2, 4]:
        say("warning", seen, "install torch 2.4 or later, with which the launcher is tested")
    if gpus and not cuda:
        to_do = "install a CUDA build of torch in the image"
        say("problem", f"torch {torch.__version__} is a CPU build, but this host has GPUs", to_do)
    elif gpus:
        if not nccl:
            to_do = "install a build of torch with NCCL, or have the script use another backend"
            say("warning", f"{seen} has no nccl backend, but this host has GPUs", to_do)
        try:
            torch.cuda.init()
        except Exception as error:
            to_do = "use a newer driver (or instance), or a build of torch for an older CUDA"
            say("problem", f"{seen} cannot use any GPU ({error})", to_do)


if __name__ == "__main__":
    look_at_torch(int(sys.argv[1]))
