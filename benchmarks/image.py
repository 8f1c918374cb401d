"""What container/Dockerfile adds to a base image: megabytes, and seconds of start.

    python benchmarks/image.py --base BASE_IMAGE --image IMAGE [--rounds 9]

IMAGE is one built on BASE_IMAGE (make image). Times go from `docker run` to the first line of a
training script on one host with one rank, three ways in turn so that a machine whose speed
drifts favours none: the base with plain torchrun, the image with the launcher as PID 1, and the
image with SageMaker's `train`. Needs a container engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = "import time; open('/opt/ml/output/first-line', 'w').write(str(time.time()))"
TORCHRUN = "python3 -m torch.distributed.run --nnodes 1 --nproc-per-node 1 --rdzv-backend c10d"
TORCHRUN += " --rdzv-endpoint localhost:0 --max-restarts 0 script.py"


def write_job(folder: Path) -> None:
    """Write the files of a training job of one host, and its script."""
    for name in ("input/config", "input/source", "output"):
        (folder / name).mkdir(parents=True)
    (folder / "input" / "source" / "script.py").write_text(SCRIPT)
    hyperparameters = {
        "train-script": "script.py",
        "sagemaker_submit_directory": "/opt/ml/input/source",
    }
    files = {
        "hyperparameters": {key: json.dumps(value) for key, value in hyperparameters.items()},
        "resourceconfig": {"current_host": "algo-1", "hosts": ["algo-1"]},
        "inputdataconfig": {},
    }
    for name, value in files.items():
        (folder / "input" / "config" / f"{name}.json").write_text(json.dumps(value))


def time_start(image: str, command: str) -> float:
    """Return the seconds from `docker run` to the first line of the script."""
    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder))
        docker = ["docker", "run", "--rm", "--hostname", "algo-1", "-v", f"{folder}:/opt/ml"]
        docker += ["-w", "/opt/ml/input/source", "-e", "AWS_DEFAULT_REGION=us-east-1"]
        start = time.time()
        done = subprocess.run([*docker, image, *command.split()], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{image} {command} failed:\n{done.stdout}{done.stderr}")
        return float(Path(folder, "output", "first-line").read_text()) - start


def inspect(image: str, what: str) -> str:
    command = ["docker", "image", "inspect", "--format", what, image]
    return subprocess.check_output(command, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--image", required=True)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    base_layers, image_layers = (
        json.loads(inspect(image, "{{json .RootFS.Layers}}")) for image in (args.base, args.image)
    )
    if image_layers[: len(base_layers)] != base_layers:
        sys.exit(f"{args.image} is not built on {args.base}")
    ways = {
        "base, plain torchrun": (args.base, TORCHRUN),
        "image, the launcher as PID 1": (args.image, "--train-script script.py"),
        "image, `train` and the launcher": (args.image, "train"),
    }
    for way in ways.values():
        time_start(*way)  # once for the page cache
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            seconds[name].append(time_start(*way))

    sizes = [int(inspect(image, "{{.Size}}")) / 1e6 for image in (args.base, args.image)]
    print(f"{args.rounds} rounds, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}\n")
    print(f"The base has {sizes[0]:.0f} MB, the image {sizes[1] - sizes[0]:.0f} MB more.\n")
    print("| `docker run` to the script's first line, s | min | median | max | to the base |")
    print("|---|---|---|---|---|")
    base = seconds["base, plain torchrun"]
    for name, values in seconds.items():
        figures = (min(values), statistics.median(values), max(values))
        ratio = statistics.median(ours / theirs for ours, theirs in zip(values, base))
        print(f"| {name} |", " | ".join(f"{v:.2f}" for v in figures), f"| {ratio:.2f} |")


if __name__ == "__main__":
    main()
