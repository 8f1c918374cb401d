"""Collectives: with torch.distributed, and with mpi4py under mpirun."""

import re

import pytest
from conftest import SYSTEMS

MPI_COLLECTIVES = SYSTEMS / "mpi_collectives.py"
torch = pytest.mark.torch


def test_collectives_with_mpi(mpirun):
    host = mpirun(6, MPI_COLLECTIVES)
    host.ends(0)
    # mpirun may put the end of a line behind another rank's.
    said = sorted(re.findall(r"rank \d of 6: every value is right", host.out))
    assert said == [f"rank {rank} of 6: every value is right" for rank in range(6)]


# Rank 0 sends other values than it should.
WRONG = """
import os, sys
sys.path.insert(0, {folder!r})
import {module} as script
if os.environ[{rank!r}] == "0":
    script.{library}.arange = lambda count: script.{library}.full((count,), 7)
script.main()
"""
SAYS = "rank 1: what rank 0 sent is [7, 7, 7]; expected [0, 1, 2]"


@torch
def test_a_wrong_value_is_told(ranks, script):
    words = {"folder": str(SYSTEMS), "module": "collectives", "library": "torch", "rank": "RANK"}
    done = ranks.run(script(WRONG.format(**words)), count=2)
    assert done.codes[1] == 1, done.err
    assert done.err.count(SAYS) == 1


def test_one_process_of_mpi_has_nobody_to_talk_to(mpirun):
    host = mpirun(1, MPI_COLLECTIVES)
    assert host.wait() == 1, host.log()
    seen = "mpi_collectives.py needs two ranks or more: mpirun -n 2 python mpi_collectives.py, "
    assert host.err.startswith(f"{seen}with the mpirun of Open MPI") and "Traceback" not in host.err


def test_mpirun_without_mpi4py(mpirun, script, tmp_path):
    script("raise RuntimeError('it is not there')", "mpi4py.py")  # as where it can load no MPI
    host = mpirun(3, MPI_COLLECTIVES, PYTHONPATH=str(tmp_path))
    assert host.wait() == 1, host.log()
    line = "mpi_collectives.py needs numpy, mpi4py and Open MPI (it is not there): pip install "
    assert host.err.count(line) == 1
    assert "Traceback" not in host.err
