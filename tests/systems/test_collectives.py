"""Collectives with mpi4py, under mpirun."""

import re

import pytest
from conftest import SYSTEMS

MPI_COLLECTIVES = SYSTEMS / "mpi_collectives.py"


def test_collectives_with_mpi(mpirun):
    host = mpirun(6, MPI_COLLECTIVES)
    host.ends(0)
    # mpirun may put the end of a line behind another rank's.
    said = sorted(re.findall(r"rank \d of 6: every value is right", host.out))
    assert said == [f"rank {rank} of 6: every value is right" for rank in range(6)]


LACKS = [
    (1, False, "two ranks or more: mpirun -n 2 python mpi_collectives.py, with the mpirun of Open"),
    (3, True, "numpy, mpi4py and Open MPI (it is not there): pip install "),
]


@pytest.mark.parametrize(("count", "without_mpi", "says"), LACKS)
def test_what_collectives_with_mpi_lack(mpirun, script, tmp_path, count, without_mpi, says):
    if without_mpi:
        script("raise RuntimeError('it is not there')", "mpi4py.py")
    host = mpirun(count, MPI_COLLECTIVES, PYTHONPATH=str(tmp_path))
    assert host.wait() == 1, host.log()
    assert host.err.count(f"mpi_collectives.py needs {says}") == 1 and "Traceback" not in host.err
