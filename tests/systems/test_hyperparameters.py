"""What SageMaker's real SDKs make of hyperparameters, to the arguments of the script.

v3's own container script runs here with /opt/ml in a folder of the test.
"""

import ast
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import sdk
from aws import ROLE
from conftest import ONE_HOST, REPO, completed, write_config
from pages import code

from launcher.job import toolkit

pytestmark = [pytest.mark.systems, pytest.mark.torch]

HYPERPARAMETERS = {"train-script": "show.py", "z": "1", "flag": "true", "no": "null"}
HYPERPARAMETERS |= {"d": '{"b": [1], "a": 2}', "text": "a  $b `c`", "number": "7", "e": "é"}
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

V3 = "v3 with `source_code`"
# What sends a job to AWS with hyperparameters, by the columns of docs/options.md.
JOBS = {
    "v2 `PyTorch`": """
from sagemaker.pytorch import PyTorch
PyTorch(
    source_dir="src", entry_point="launcher.py", framework_version="2.8", py_version="py312",
    hyperparameters=values, instance_type="ml.c5.xlarge", instance_count=1, role=role,
).fit(wait=False)
""",
    "v2 `Estimator`": """
from sagemaker.estimator import Estimator
Estimator(
    "1.dkr.ecr.us-east-1.amazonaws.com/own:1",
    hyperparameters=values, instance_type="ml.c5.xlarge", instance_count=1, role=role,
).fit(wait=False)
""",
    V3: """
from sagemaker.core.training.configs import Compute, SourceCode
from sagemaker.train.model_trainer import ModelTrainer
ModelTrainer(
    training_image="1.dkr.ecr.us-east-1.amazonaws.com/own:1",
    source_code=SourceCode(source_dir="src", entry_script="launcher.py"),
    hyperparameters=values, compute=Compute(instance_type="ml.c5.xlarge"), role=role,
).train(wait=False)
""",
}
TOOLKIT = """
import json
from sagemaker_training import environment
print(json.dumps(environment.Environment().to_cmd_args()))
"""


@pytest.fixture
def container(tmp_path):
    """Return what runs a container of the SDK's, and returns the script's arguments and the log."""
    ml = tmp_path / "ml"
    drivers = ml / "input" / "data" / "sm_drivers"
    for folder in (drivers, ml / "output"):
        folder.mkdir(parents=True)
    sdk.make_source(tmp_path)
    (tmp_path / "src").rename(ml / "input" / "data" / "code")
    (ml / "input" / "data" / "code" / "show.py").write_text(SHOW)
    resources = {"network_interface_name": "lo", "current_instance_type": "ml.c5.xlarge"}

    def run(hyperparameters=HYPERPARAMETERS, **source):
        write_config(ml, hyperparameters, {**ONE_HOST, **resources})
        made = completed(sdk.python("v3"), "-c", MAKE, drivers, json.dumps(source))
        theirs = Path(made.stdout.splitlines()[-1])
        for path in theirs.rglob("*.py"):
            (drivers / path.relative_to(theirs)).parent.mkdir(exist_ok=True)
            (drivers / path.relative_to(theirs)).write_text(path.read_text())
        for path in (*drivers.rglob("*.py"), drivers / "sm_train.sh"):
            path.write_text(path.read_text().replace("/opt/ml", str(ml)))
        environ = {"TRAINING_JOB_NAME": "job", "PYTHONUTF8": "1"}
        environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        done = completed("bash", drivers / "sm_train.sh", timeout=120, **environ)
        log = done.stdout + done.stderr
        (said,) = (line for line in log.splitlines() if line.startswith("argv "))
        return json.loads(said[len("argv ") :]), log

    return run


# docs/guide.md: how v3 starts run.sh.
GUIDE = (REPO / "docs" / "guide.md").read_text(encoding="utf-8")
RUN_SH = re.search(r"^\| `run\.sh` \|.*?\| `(.*?)`, or `(.*?)` \|", GUIDE, re.MULTILINE).groups()


@pytest.mark.parametrize("source", RUN_SH)
def test_a_shell_script_that_ends_with_the_launcher(container, tmp_path, source):
    (lines,) = code(REPO / "docs" / "guide.md", "sh")
    lines = lines.replace("more-requirements.txt", os.devnull)
    (tmp_path / "ml" / "input" / "data" / "code" / "run.sh").write_text(lines)
    theirs, _ = container(entry_script="show.py")
    ours, _ = container(**eval(f"dict({source})"))
    assert ours == theirs[2:]


@pytest.fixture
def sent(requested, script):
    """Return what sends a job, and returns the hyperparameters of its CreateTrainingJob."""

    def sent(column, values):
        program = f"import json, sys\nrole, values = {ROLE!r}, json.loads(sys.argv[1])\n"
        path = script(program + JOBS[column], f"program_{column[:2]}.py")
        return requested(path, json.dumps(values))["HyperParameters"]

    return sent


def the_pages_table():
    """Return the hyperparameters in docs/options.md, and the words of each in every column."""
    page = (REPO / "docs" / "options.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| in the estimator \| .*\n(?:\|.*\n)+", page, re.MULTILINE)
    head, _, *lines = ([cell.strip() for cell in line.split(" | ")] for line in table.splitlines())
    columns = [name.strip("| ") for name in head[1:]]
    values, words = {}, {name: {} for name in columns}
    for first, *cells in lines:
        ((key, value),) = ast.literal_eval(f"{{{first.strip('|` ')}}}").items()
        values[key] = value
        for name, cell in zip(columns, cells):
            words[name][key] = shlex.split(cell.strip("|` "))
    return values, words


def in_order(words, keys):
    return [word for key in keys for word in words[key]]


@pytest.mark.parametrize("column", [name for name in JOBS if name != V3])
def test_the_pages_arguments_of_v2_are_those_of_sdk_and_toolkit(sent, tmp_path, column):
    values, words = the_pages_table()
    write_config(tmp_path / "ml", sent(column, values))
    environ = {**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}
    theirs = completed(sys.executable, "-c", TOOLKIT, **environ)
    expected = in_order(words[column], sorted(values))
    assert json.loads(theirs.stdout.splitlines()[-1]) == expected
    # And an image without the toolkit.
    assert toolkit.to_cmd_args(toolkit.read_config(environ).hyperparameters) == expected


def test_the_pages_arguments_of_v3_are_those_of_its_driver(sent, container):
    values, words = the_pages_table()
    rendered = sent(V3, values)
    got, _ = container({"train-script": "show.py", **rendered}, entry_script="launcher.py")
    assert got == in_order(words[V3], values)
