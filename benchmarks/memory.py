"""The memory that a rank needs, with each way of train_transformer.py to share a model.

    python benchmarks/memory.py [--ranks 4] [--width 640] [--layers 8]

A process per rank on this machine, on CPU, under torchrun. Bytes are those of this rank's own
tensors after a step: parameters, gradients, the optimizer's state. The peak is that of the whole
process (its resident memory, from before the model was made), so it has the activations, what is
sent and received, and the whole model that each rank makes at first in it. Of all ranks the table
has the one that needs most.

The ranks run with MALLOC_MMAP_THRESHOLD_=65536. By default glibc keeps what fsdp frees after each
block, up to 32 MiB a tensor, and often cannot use it again: the peak is then above that of ddp.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "train_scripts"
SHAPE = ("--heads", "8", "--length", "16", "--batch-size", "8", "--vocabulary", "64")
WAYS = {
    "ddp": ("--parallel", "ddp"),
    "ddp, --shard-optimizer": ("--parallel", "ddp", "--shard-optimizer", "true"),
    "fsdp": ("--parallel", "fsdp"),
    "tensor": ("--parallel", "tensor"),
    "pipeline": ("--parallel", "pipeline"),
}
STEPS = 3


def measure() -> None:
    """Be a rank: take some steps, then print as JSON what the ranks needed, if this is rank 0."""
    sys.path.insert(0, str(SCRIPTS))
    import torch.distributed as dist
    import train_transformer as script
    from torch.distributed.tensor import DTensor

    def size(tensors) -> int:
        own = (one.to_local() if isinstance(one, DTensor) else one for one in tensors)
        return sum(one.numel() * one.element_size() for one in own)

    args = script.parse_args()
    device = script.join_group()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    model, optimizer, compute = script.make(args, device)
    for step in range(STEPS):
        optimizer.zero_grad()
        compute(*(tokens.to(device) for tokens in script.make_batch(args, step)))
        optimizer.step()
    inner = optimizer.optim if args.shard_optimizer else optimizer
    parameters = list(model.parameters())
    needs = {
        "parameters": size(parameters),
        "gradients": size(one.grad for one in parameters),
        "optimizer": size(one for state in inner.state.values() for one in state.values()),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
    }
    all_needs: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_needs, needs)
    if dist.get_rank() == 0:
        print(json.dumps({name: max(one[name] for one in all_needs) for name in needs}), flush=True)
    script.leave_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    import torch

    print(
        f"{args.ranks} ranks on one machine, CPU, {os.cpu_count()} CPUs, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}\n"
    )
    print("| MB per rank | parameters | gradients | optimizer state | sum | peak of the process |")
    print("|---|---|---|---|---|---|")
    shape = (*SHAPE, "--width", str(args.width), "--layers", str(args.layers))
    for name, way in WAYS.items():
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        command += [str(args.ranks), __file__, *shape, *way, "--checkpoint-dir", ""]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environ.update(MALLOC_MMAP_THRESHOLD_="65536", MEASURE="1")
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        needs = json.loads(done.stdout.splitlines()[-1])
        kept = [needs[name] for name in ("parameters", "gradients", "optimizer")]
        columns = (*kept, sum(kept), needs["peak"])
        print(f"| {name} | {' | '.join(f'{one / 1e6:.0f}' for one in columns)} |", flush=True)


if __name__ == "__main__":
    measure() if os.environ.get("MEASURE") else main()
