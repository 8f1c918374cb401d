"""`make demo`, as people run it, but for the installation."""

import re
import subprocess
import sys

import pytest
from conftest import REPO


@pytest.mark.torch
@pytest.mark.timeout(400)  # it trains a ResNet18
def test_the_demo_trains_and_says_where_the_model_is(tmp_path):
    for folder in ("examples", "train_scripts"):
        (tmp_path / folder).symlink_to(REPO / folder)
    make = ["make", "-f", str(REPO / "Makefile"), f"VENV={sys.prefix}", "WITH_TORCH=examples"]
    done = subprocess.run(
        [*make, "--assume-old=examples", "demo"], capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout[done.stdout.index("The job succeeded after ") :]
    assert "Its files, in runs/demo:\n" in said
    assert re.search("^  algo-1/model: .*model.pt", said, re.MULTILINE)
    first = tmp_path / "runs" / "demo" / "algo-1"
    assert (first / "model" / "model.pt").exists()
    for name in ("curves.png", "predictions.png"):
        assert re.search(f"^  algo-1/output/data: .*{name}", said, re.MULTILINE)
        assert (first / "output" / "data" / name).exists()
    assert float(re.findall(r"val_accuracy=([\d.]+)", done.stdout)[-1]) > 0.9
