"""What tests of systems share: the mpirun of this machine."""

import shutil
import sys

import pytest


@pytest.fixture
def mpirun(start):
    """Start ranks with the real mpirun: mpirun(count, script, *args, NAME=value) -> Host."""
    assert shutil.which("mpirun"), "these tests need Open MPI: apt-get install openmpi-bin"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def mpirun(count, script, *args, **environment):
        # Not bound to the first cores, as other tests' ranks would be, too.
        words = ("-n", count, "--oversubscribe", "--bind-to", "none", sys.executable, script, *args)
        return start(*words, command=["mpirun"], **root, **environment)

    return mpirun
