"""`make demo`, as people run it, but for the installation."""

import re
import subprocess
import sys

import pytest
from cluster.engine import copy_tracked_files


@pytest.mark.torch
def test_the_demo_trains_and_says_where_the_model_is(tmp_path):
    copy_tracked_files(tmp_path)
    make = ["make", "-C", str(tmp_path), f"VENV={sys.prefix}", "demo"]
    done = subprocess.run(make, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout[done.stdout.index("The job succeeded after ") :]
    assert "Outputs in runs/demo:\n" in said
    assert re.search("^  algo-1/model: .*model.pt", said, re.MULTILINE)
    first = tmp_path / "runs" / "demo" / "algo-1"
    assert (first / "model" / "model.pt").exists()
    for name in ("curves.png", "predictions.png"):
        assert re.search(f"^  algo-1/output/data: .*{name}", said, re.MULTILINE)
        assert (first / "output" / "data" / name).exists()
    assert float(re.findall(r"val_accuracy=([\d.]+)", done.stdout)[-1]) > 0.9
