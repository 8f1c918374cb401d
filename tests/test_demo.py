"""`make demo`: the two-host example, as people run it."""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPO, free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]  # the demo trains a ResNet18


def run(*args):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", str(REPO / "examples" / "two_hosts.sh"), *map(str, args)],
        env={**os.environ, "PATH": path, "LAUNCHER_RDZV_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=380,
    )


def test_the_example_trains_and_says_where_the_model_is(tmp_path):
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("runs/demo/127.0.0.1/model/model.pt")
    first = tmp_path / "runs" / "demo" / "127.0.0.1"
    assert (first / "model" / "model.pt").exists()
    for name in ("curves.png", "predictions.png"):
        assert f"To look at: {first}/output/data/{name}\n" in done.stdout
        assert (first / "output" / "data" / name).exists()
    assert float(re.findall(r"val_accuracy=([\d.]+)", done.stdout)[-1]) > 0.9


def test_the_example_shows_why_it_failed(script):
    done = run(script("raise ValueError('loss is nan')"))
    assert done.returncode == 1
    assert "failed with ValueError: loss is nan" in done.stdout
