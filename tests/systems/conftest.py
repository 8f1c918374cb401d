"""What tests of systems share: the mpirun of this machine, and what SDKs ask of AWS."""

import sys
from pathlib import Path

import pytest
import sdk
from aws import Aws
from conftest import REPO


@pytest.fixture
def mpirun(start):
    """Start ranks with the real mpirun: mpirun(count, script, *args, NAME=value) -> Host."""
    program = Path(sys.executable).with_name("mpirun")  # of the package openmpi
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    alone = {"OMPI_MCA_plm": "isolated"}  # else it wants an ssh, with one host, too

    def mpirun(count, script, *args, **environment):
        # Not bound to the first cores, as other tests' ranks would be, too.
        words = ("-n", count, "--oversubscribe", "--bind-to", "none", sys.executable, script, *args)
        return start(*words, command=[str(program)], **root, **alone, **environment)

    return mpirun


@pytest.fixture
def aws():
    aws = Aws()
    yield aws
    aws.stop()


@pytest.fixture
def requested(aws, tmp_path):
    """Run an example, or a program of such a name; return its CreateTrainingJob's parameters."""

    def requested(name, *args):
        sdk.make_source(tmp_path, *(REPO / "train_scripts").glob("*.py"))
        process = sdk.start(name, *args, env=sdk.environment(aws, tmp_path), cwd=tmp_path)
        assert process.wait(300) == 0, (tmp_path / "log").read_text()
        return aws.training_job()

    return requested
