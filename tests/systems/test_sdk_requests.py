"""examples/sagemaker on AWS, as far as a request for a training job goes.

The real SDKs make it, check it against AWS's model of the API, and send it to aws.py. What is
expected here is what AWS documents for CreateTrainingJob.
"""

import contextlib
import json
import re
import shlex

import pytest
import sdk
from aws import REGION, ROLE
from cluster.hosts import AWS_START, INIT_OF_A_CHANNEL
from conftest import REPO, TRAIN_HYMENOPTERA
from pages import blocks, code

pytestmark = [pytest.mark.systems]
versions = pytest.mark.parametrize("version", sdk.VERSIONS)

AWS_IMAGE = f"763104351884.dkr.ecr.{REGION}.amazonaws.com/pytorch-training:2.8-gpu-py312"
DATA = ("--data", "s3://bucket/hymenoptera_data", "--role", ROLE)


def command_of_the_guide():
    """Return the arguments with which docs/guide.md has the reference job run on AWS."""
    commands = [c for block in blocks(REPO / "docs" / "guide.md") for c in block.commands]
    (command,) = (command for command in commands if "_v3.py --role" in command)
    command = command.replace("ROLE_ARN", ROLE).replace("BUCKET", "bucket").replace("\\\n", "")
    words = shlex.split(command, comments=True)
    assert words[:2] == ["sdk/bin/python", "examples/sagemaker/hymenoptera_v3.py"]
    return words[2:]


def hyperparameters(job):
    """Return them as arguments of the script: in a request they are JSON or text."""
    values = {}
    for name, value in job.get("HyperParameters", {}).items():
        if not name.startswith("sagemaker_"):  # the SDK's own
            with contextlib.suppress(ValueError):
                value = json.loads(value)
            values[name] = str(value)
    return values


def inputs(job):
    """Return the job's channels and where they are in S3, without those of the SDK itself."""
    sources = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]
        for channel in job["InputDataConfig"]
    }
    assert {source["S3DataType"] for source in sources.values()} == {"S3Prefix"}
    assert {source["S3DataDistributionType"] for source in sources.values()} == {"FullyReplicated"}
    own = {"code", "sm_drivers"}
    return {name: source["S3Uri"] for name, source in sources.items() if name not in own}


def sent_files(aws):
    """Return the names of the files that were put into S3."""
    paths = (each.action.split()[1] for each in aws.requests if each.action.startswith("PUT "))
    return {path.partition("?")[0].rpartition("/")[2] for path in paths}


@pytest.fixture
def metrics(ranks, ants_and_bees, tmp_path):
    """Run the reference script; return its log, and each metric's values as its file has them."""
    small = ["--weights", "none", "--epochs", "2", "--image-size", "64", "--batch-size", "8"]
    folders = [f"--{name}-dir={tmp_path / name}" for name in ("model", "checkpoint")]
    output = {"SM_OUTPUT_DATA_DIR": str(tmp_path / "output-data")}
    job = (TRAIN_HYMENOPTERA, "--data", ants_and_bees, *small, *folders)
    done = ranks.run(*job, count=2, **output)
    assert done.codes == [0, 0], done.err
    lines = (tmp_path / "output-data" / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line) for line in lines]
    return done.out, {name: [epoch[name] for epoch in epochs] for name in epochs[0]}


CHANNELS = {name: f"s3://bucket/hymenoptera_data/{name}" for name in ("train", "val")}
REFERENCE = {"train-script": "train_hymenoptera.py", "epochs": "25"}


@versions
def test_the_reference_job(requested, aws, metrics, version):
    job = requested(f"hymenoptera_{version}.py", *command_of_the_guide(), "epochs=3")
    algorithm = job["AlgorithmSpecification"]
    assert algorithm["TrainingImage"] == AWS_IMAGE
    assert job["RoleArn"] == ROLE
    assert inputs(job) == CHANNELS
    assert hyperparameters(job) == {**REFERENCE, "epochs": "3"}
    resources = job["ResourceConfig"]
    assert (resources["InstanceType"], resources["InstanceCount"]) == ("ml.g5.xlarge", 2)
    default = {"v2": 24 * 3600, "v3": 3600}  # as docs/guide.md says
    assert job["StoppingCondition"]["MaxRuntimeInSeconds"] == default[version]
    log, values = metrics
    for metric in algorithm["MetricDefinitions"]:
        pattern = re.compile(metric["Regex"])
        assert pattern.groups == 1  # the value
        found = [float(value) for value in pattern.findall(log)]
        assert found == pytest.approx(values.pop(metric["Name"]), abs=1e-4) and len(found) == 2
    assert set(values) == {"epoch", "lr", "images_per_second"}
    if version == "v2":  # the toolkit runs the program that it finds in the archive
        assert json.loads(job["HyperParameters"]["sagemaker_program"]) == "launcher.py"
        assert sent_files(aws) == {"sourcedir.tar.gz"}
        distributions = [name for name in job["HyperParameters"] if "_enabled" in name]
        assert distributions == []
    else:  # a driver of the SDK's own runs it, in place of the image's entry point
        assert algorithm["ContainerEntrypoint"] == ["/bin/bash"]
        assert {"launcher.py", "train_hymenoptera.py", "sm_train.sh"} <= sent_files(aws)


@versions
def test_a_heterogeneous_cluster(requested, version):
    job = requested(f"groups_{version}.py", *DATA)
    groups = {"gpu": ("ml.g5.xlarge", 2), "cpu": ("ml.c5.2xlarge", 1)}
    resources = job["ResourceConfig"]
    assert "InstanceType" not in resources and "InstanceCount" not in resources
    assert groups == {
        group["InstanceGroupName"]: (group["InstanceType"], group["InstanceCount"])
        for group in resources["InstanceGroups"]
    }
    assert job["Environment"] == {"LAUNCHER_INSTANCE_GROUPS": "gpu"}
    assert job["AlgorithmSpecification"]["TrainingImage"] == AWS_IMAGE
    assert hyperparameters(job) == REFERENCE


ESTIMATORS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in (REPO / "README.md", REPO / "docs" / "guide.md")
    for number, block in enumerate(code(page, "python"))
    if re.search(r"^from sagemaker\b", block, re.MULTILINE)
]
assert len(ESTIMATORS) == 4  # of both versions, on either page


@pytest.mark.parametrize("block", ESTIMATORS)
def test_an_estimator_of_the_pages(requested, script, block):
    """As it stands there, with a role and an image, and without the wait for the job's end."""
    version = "v3" if "ModelTrainer" in block else "v2"
    call = r"\)\.(fit|train)\((.*)\)\n$"
    assert re.search(call, block), block
    block = re.sub(call, r").\1(\2, wait=False)\n", block).replace("BUCKET", "bucket")
    program = f"role, image = {ROLE!r}, {AWS_IMAGE!r}\n{block}"
    job = requested(script(program, f"program_{version}.py"))
    algorithm = job["AlgorithmSpecification"]
    assert algorithm["TrainingImage"] == AWS_IMAGE
    assert hyperparameters(job)["train-script"] == "train.py"
    assert inputs(job)["train"] == "s3://bucket/train"
    is_spot = "/checkpoints/" in block
    assert job.get("EnableManagedSpotTraining", False) is is_spot
    assert ("CheckpointConfig" in job) is is_spot
    entry_point = [*INIT_OF_A_CHANNEL, *AWS_START, "train"] if is_spot else None
    expected = ["/bin/bash"] if version == "v3" else entry_point
    assert algorithm.get("ContainerEntrypoint") == expected
