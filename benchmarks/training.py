"""How fast train_hymenoptera.py is, against the notebook's way of it (notebook_way.py).

    python benchmarks/training.py [--ranks 2] [--epochs 2] [--seeds 3]

Both in turn, with the same made-up pictures, weights, batches and epochs, under torchrun on this
machine. Timed inside the script, from before the data are read to the end of the last epoch, with
all reading, decoding, validation and checkpoints. The weights are made first: some epochs on other
pictures, smaller ones. On a CPU it also prints how fast the same work could be at most. Needs what
setup.cfg's extra `train` names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SCRIPTS = REPO / "train_scripts"
BATCH, LR = "32", "0.004"
TRAIN, VAL = 244, 153  # pictures, as many as the real ones


def run(ranks: int, folder: Path, *argv: object, **variables: str) -> str:
    """Run a script with `ranks` ranks, its temporary files in folder; return what it printed."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *map(str, argv)]
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "TMPDIR": str(folder), **variables}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def ours(ranks: int, data: Path, folder: Path, epochs: int, seed: int, *options: object) -> dict:
    """Train as the reference script does; return its speed and its accuracy."""
    argv = [SCRIPTS / "train_hymenoptera.py", "--data", data, "--epochs", epochs, "--seed", seed]
    for option in ("checkpoint-dir", "model-dir"):
        argv += [f"--{option}", folder / option]
    output = {"SM_OUTPUT_DATA_DIR": str(folder / "output")}
    out = run(ranks, folder.parent, *argv, "--batch-size", BATCH, *options, **output)
    last = (folder / "output" / "metrics.jsonl").read_text().splitlines()[-1]
    speed = float(out.partition("s: ")[2].partition(" pictures/s")[0])
    return {"pictures_per_second": speed, "val_accuracy": json.loads(last)["val_accuracy"]}


def make_pictures(folder: Path, seed: int, train: int, val: int, size: int) -> None:
    numbers = {"--seed": seed, "--train": train, "--val": val, "--size": size}
    argv = [sys.executable, REPO / "examples" / "draw_pictures.py", folder]
    subprocess.run([*argv, *(str(one) for pair in numbers.items() for one in pair)], check=True)


def bounds() -> dict[str, float]:
    """Return how many pictures/s this processor could train with if all of its work were products.

    Products of large matrices are the fastest that it does, and networks are made of them: nothing
    that multiplies the same numbers in the same type can be faster.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision.models import resnet18

    network, picture = resnet18(num_classes=2), torch.zeros(1, 3, 224, 224)
    with FlopCounterMode(display=False) as step:
        network(picture).sum().backward()
    with FlopCounterMode(display=False) as validation:
        network(picture)
    work = step.get_total_flops() + validation.get_total_flops() * VAL / TRAIN
    speeds = {}
    for kind in (torch.float32, torch.bfloat16):
        matrix = torch.rand(2048, 2048).to(kind)
        seconds = []
        for _ in range(10):
            began = time.perf_counter()
            matrix @ matrix
            seconds.append(time.perf_counter() - began)
        speeds[str(kind)] = 2 * 2048**3 / min(seconds) / work
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_pictures(folder / "before", 1, 240, 40, 160)
        options = ("--weights", "none", "--image-size", "96", "--lr", "0.02")
        ours(args.ranks, folder / "before", folder / "weights", 6, 1, *options)
        weights = folder / "weights" / "model-dir" / "model.pt"
        # As large as the real ones: 500 x 375 has as many pixels.
        make_pictures(folder / "data", 0, TRAIN, VAL, 433)
        for seed in range(args.seeds):
            options = ("--weights", weights, "--lr", LR)
            folders = (folder / "data", folder / str(seed))
            fast = ours(args.ranks, *folders, args.epochs, seed, *options)
            argv = (folder / "data", weights, args.epochs, BATCH, LR, seed)
            slow = json.loads(
                run(args.ranks, folder, REPO / "benchmarks" / "notebook_way.py", *argv)
            )
            rows.append((fast, slow))

    import torch

    gpus = torch.cuda.device_count() >= args.ranks  # else both scripts train on CPU
    device = torch.cuda.get_device_name() if gpus else "CPU"
    print(
        f"{args.ranks} ranks, {args.epochs} epochs, {os.cpu_count()} CPUs, {device}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}\n"
    )
    print("| seed | ours, pictures/s | notebook's way | ratio | accuracy, ours | notebook's way |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for seed, (fast, slow) in enumerate(rows):
        ratios.append(fast["pictures_per_second"] / slow["pictures_per_second"])
        speeds = f"{fast['pictures_per_second']:.1f} | {slow['pictures_per_second']:.1f}"
        accuracies = f"{fast['val_accuracy']:.3f} | {slow['val_accuracy']:.3f}"
        print(f"| {seed} | {speeds} | {ratios[-1]:.2f} | {accuracies} |")
    means = [statistics.mean(row[way]["val_accuracy"] for row in rows) for way in (0, 1)]
    print(f"| all | | | {statistics.median(ratios):.2f} | {means[0]:.3f} | {means[1]:.3f} |")
    if device == "CPU":
        print()
        notebook = statistics.median(slow["pictures_per_second"] for _, slow in rows)
        for name, most in bounds().items():
            times = f"{most:.1f} pictures/s, {most / notebook:.2f} times the notebook's way"
            print(f"At the speed of this CPU's products of {name} matrices: {times}")


if __name__ == "__main__":
    main()
