"""What tests of systems share: the mpirun of this machine."""

import sys
from pathlib import Path

import pytest


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
