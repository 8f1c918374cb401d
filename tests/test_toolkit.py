"""The toolkit's work without the toolkit, compared with the real sagemaker-training."""

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import completed, write_config

from launcher.errors import LaunchError
from launcher.job import toolkit

HYPERPARAMETERS = {
    "train-script": '"train.py"',
    "epochs": "3",
    "lr": "1e-05",
    "t": "true",
    "no": "null",
    "list": '[1, "a"]',
    "dict": '{"b": 2, "a": [1]}',
    "text": "plain text",
    "spaced": '"a  b"',
    "nested": '"\\"quoted\\""',
    "unicode": '"é"',
    "sagemaker_program": '"launcher/__main__.py"',
    "sagemaker_submit_directory": '"s3://bucket/source.tar.gz"',
    "sagemaker_region": '"us-east-1"',
    "sagemaker_job_name": '"job-7"',
    "sagemaker_container_log_level": "30",
    "sagemaker_s3_output": '"s3://bucket"',
    "sagemaker_other": "1",
    "_tuning_objective_metric": '"accuracy"',
    "default_user_module_name": '"x"',
}
RESOURCES = {
    "current_host": "algo-2",
    "hosts": ["algo-1", "algo-2"],
    "network_interface_name": "eth0",
    "current_instance_type": "ml.c5.xlarge",
    "current_group_name": "train",
    "instance_groups": [
        {"instance_group_name": "data", "instance_type": "ml.c5.large", "hosts": ["algo-1"]},
        {"instance_group_name": "train", "instance_type": "ml.c5.xlarge", "hosts": ["algo-2"]},
    ],
}
CHANNELS = {"train": {"TrainingInputMode": "File"}, "val": {}}


@pytest.fixture
def base(tmp_path):
    """Write the three config files; return the folder for SAGEMAKER_BASE_DIR."""

    def write(hyperparameters=HYPERPARAMETERS, resources=RESOURCES, channels=CHANNELS) -> str:
        write_config(tmp_path / "ml", hyperparameters, resources, channels)
        return str(tmp_path / "ml")

    return write


REAL = """
import json, os
from sagemaker_training import environment
e = environment.Environment()
print(json.dumps([e.to_cmd_args(), e.to_env_vars(), os.environ["SAGEMAKER_JOB_NAME"]]))
"""


@pytest.mark.parametrize(
    "resources", [RESOURCES, {"current_host": "algo-1", "hosts": ["algo-1"]}], ids=["full", "bare"]
)
def test_arguments_and_variables_are_the_toolkits(base, resources):
    folder = base(resources=resources)
    environ = {**os.environ, "SAGEMAKER_BASE_DIR": folder, "AWS_DEFAULT_REGION": "us-east-1"}
    environ["TRAINING_JOB_NAME"] = "job"
    real = completed(sys.executable, "-c", REAL, **environ)
    args, variables, job_name = json.loads(real.stdout.splitlines()[-1])
    config = toolkit.read_config(environ)
    assert toolkit.to_cmd_args(config.hyperparameters) == args
    ours = toolkit.to_env_vars(config, environ)
    assert ours.pop("SAGEMAKER_JOB_NAME") == job_name == "job-7"
    assert ours.pop("CURRENT_HOST") == resources["current_host"]
    assert ours.pop("SAGEMAKER_REGION") == "us-east-1"
    ours_env, real_env = (json.loads(v.pop("SM_TRAINING_ENV")) for v in (ours, variables))
    assert ours == variables
    # What only the toolkit's own distributions use is left out.
    for name in ("is_modelparallel_enabled", "is_smddpmprun_installed", "is_smddprun_installed"):
        del real_env[name]
    for name in ("is_master", "master_hostname", "distribution_hosts"):
        del real_env[name]
    assert ours_env == real_env


def test_all_variables_have_the_devices_that_the_environment_says(base):
    """As `sm-launch local` does, whose hosts share a machine."""
    environ = {"SAGEMAKER_BASE_DIR": base(), "SM_NUM_GPUS": "3", "SM_NUM_CPUS": "7"}
    variables = toolkit.to_env_vars(toolkit.read_config(environ), environ)
    assert (variables["SM_NUM_GPUS"], variables["SM_NUM_CPUS"]) == ("3", "7")
    everything = json.loads(variables["SM_TRAINING_ENV"])
    assert (everything["num_gpus"], everything["num_cpus"]) == (3, 7)


def test_no_config_folder_is_no_config(tmp_path):
    assert toolkit.read_config({}) is None  # there is no /opt/ml on this machine
    with pytest.raises(LaunchError, match="expected the config files of a training job"):
        toolkit.read_config({"SAGEMAKER_BASE_DIR": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("hyperparameters.json", None, "cannot read"),
        ("resourceconfig.json", "{", "is not JSON"),
        ("inputdataconfig.json", "[1]", "expected a JSON object"),
        ("hyperparameters.json", "[" * 100000, "is not JSON"),
        ("resourceconfig.json", '{"hosts": ["algo-1"]}', "has no 'current_host'"),
        ("resourceconfig.json", '{"current_host": "algo-1"}', "has no 'hosts'"),
    ],
)
def test_a_config_file_that_is_missing_or_malformed(base, name, text, says):
    folder = base()
    path = Path(folder, "input", "config", name)
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        toolkit.read_config({"SAGEMAKER_BASE_DIR": folder})
    assert str(path) in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("groups", [1, ["a"], [{"hosts": []}], {"a": 1}, [[1]]])
def test_unusable_instance_groups(base, groups):
    environ = {"SAGEMAKER_BASE_DIR": base(resources={**RESOURCES, "instance_groups": groups})}
    with pytest.raises(LaunchError, match=r"^instance_groups of resourceconfig\.json is "):
        toolkit.to_env_vars(toolkit.read_config(environ), environ)
