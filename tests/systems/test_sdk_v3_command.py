"""Hyperparameters under SDK v3's own container script, with /opt/ml in a folder of the test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sdk

pytestmark = [pytest.mark.systems, pytest.mark.torch, pytest.mark.timeout(400)]

HYPERPARAMETERS = {"train-script": "show.py", "z": 1, "lr": 1e-3, "flag": True, "no": None}
HYPERPARAMETERS |= {"d": {"b": [1], "a": 2}, "text": "a  $b `c`", "number": "7", "e": "é"}
SHOW = "import json, sys\nprint('argv', json.dumps(sys.argv[1:]), flush=True)\n"
# The two methods of the SDK that make what is sent to the container.
MAKE = """
import json, sys, types
from pathlib import Path
from sagemaker.core.training.configs import SourceCode
from sagemaker.train import container_drivers
from sagemaker.train.model_trainer import ModelTrainer

folder = types.SimpleNamespace(name=sys.argv[1])
source = SourceCode(source_dir="src", **json.loads(sys.argv[2]))
trainer = types.SimpleNamespace(hyperparameters={"x": 1})
ModelTrainer._prepare_train_script(trainer, folder, source)
ModelTrainer._write_source_code_json(trainer, folder, source)
print(Path(container_drivers.__file__).parent)
"""


@pytest.fixture
def container(tmp_path):
    """Return what runs a container of the SDK's, and returns the script's arguments and the log."""
    ml = tmp_path / "ml"
    drivers = ml / "input" / "data" / "sm_drivers"
    for folder in (drivers, ml / "input" / "config", ml / "output"):
        folder.mkdir(parents=True)
    sdk.make_source(tmp_path)
    (tmp_path / "src").rename(ml / "input" / "data" / "code")
    (ml / "input" / "data" / "code" / "show.py").write_text(SHOW)
    rendered = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in HYPERPARAMETERS.items()
    }
    resources = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo"}
    resources["current_instance_type"] = "ml.c5.xlarge"
    for name, value in (
        ("hyperparameters", rendered),
        ("resourceconfig", resources),
        ("inputdataconfig", {}),
    ):
        (ml / "input" / "config" / f"{name}.json").write_text(json.dumps(value))

    def run(**source):
        words = [sdk.python("v3"), "-c", MAKE, str(drivers), json.dumps(source)]
        made = subprocess.run(words, capture_output=True, text=True, check=True)
        theirs = Path(made.stdout.splitlines()[-1])
        for path in theirs.rglob("*.py"):
            (drivers / path.relative_to(theirs)).parent.mkdir(exist_ok=True)
            (drivers / path.relative_to(theirs)).write_text(path.read_text())
        for path in (*drivers.rglob("*.py"), drivers / "sm_train.sh"):
            path.write_text(path.read_text().replace("/opt/ml", str(ml)))
        environ = {"TRAINING_JOB_NAME": "job", "PYTHONUTF8": "1"}
        environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(drivers / "sm_train.sh")],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, log
        (said,) = (line for line in log.splitlines() if line.startswith("argv "))
        return json.loads(said[len("argv ") :]), log

    return run


def test_a_command_without_arguments_gets_what_an_entry_script_gets(container):
    theirs, _ = container(entry_script="show.py")
    assert theirs[:2] == ["--train-script", "show.py"] and "null" in theirs
    ours, log = container(command="python3 launcher.py")
    assert ours == theirs[2:]
    assert "using the hyperparameters (SM_HPS)." in log
    assert "not among the arguments" not in log


def test_a_command_with_arguments_says_which_ones_are_lost(container):
    ours, log = container(command="python3 launcher.py", args=["--train-script", "show.py", "-z"])
    assert ours == ["-z"]
    assert "not among the arguments: lr, flag, no, d, text, number, e.\n" in log
