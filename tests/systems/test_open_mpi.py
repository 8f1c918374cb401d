"""The reference scripts as ranks of a real mpirun, unchanged, by under_mpirun.py."""

import importlib
import signal

import pytest
from conftest import SYSTEMS, TRAIN_DDP, free_port

pytestmark = pytest.mark.torch


@pytest.mark.systems
def test_a_stopped_job_resumes(mpirun):
    # --mca odls_base_sigkill_timeout 10: seconds to save, which mpirun waits in full; by default 1.
    variables = {"OMPI_MCA_odls_base_sigkill_timeout": "10", "OMP_NUM_THREADS": "1"}
    # mpirun reads no output after a stop, and gives SIGTERM later: in epochs of a moment rank 0
    # would by then wait in a full pipe (about 500 lines), and be killed there.
    words = (2, SYSTEMS / "under_mpirun.py", "--train-script", TRAIN_DDP, "--samples", 8192)
    words += ("--batch-size", 32, "--checkpoint-dir", "checkpoints", "--model-dir", "model")
    words += ("--epochs",)
    host = mpirun(*words, 5000, MASTER_PORT=str(free_port()), **variables)
    host.wait_for("epoch=2 loss=")
    host.signal(signal.SIGTERM)
    host.ends(1)  # mpirun's own, for every stop
    assert "stopped by SIGTERM; saved checkpoints/checkpoint-" in host.log()
    host = mpirun(*words, 3, MASTER_PORT=str(free_port()), **variables)
    assert host.wait() == 0, host.log()
    assert "resuming from checkpoints/checkpoint-" in host.log()
    assert "epoch=1 loss=" not in host.out


FIRST_HOSTS = {
    "MASTER_ADDR": ({"MASTER_ADDR": "a", "SM_HOSTS": '["b", "c"]'}, "a"),
    "smdistributed": ({"SMDATAPARALLEL_SERVER_ADDR": "b", "SMDATAPARALLEL_SERVER_PORT": "1"}, "b"),
    "SageMaker's hosts": ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "algo-1"),
    "one host": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "localhost"),
}
MPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in MPI.items()}


@pytest.fixture
def from_open_mpi(monkeypatch):
    monkeypatch.syspath_prepend(str(SYSTEMS))
    return importlib.import_module("under_mpirun").from_open_mpi


@pytest.mark.parametrize("case", FIRST_HOSTS)
def test_the_first_host_under_mpirun(from_open_mpi, case):
    more, first = FIRST_HOSTS[case]
    variables = from_open_mpi({**MPI, **more})
    assert variables["MASTER_ADDR"] == first
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("3", "4", "0")


def test_several_hosts_of_which_none_is_known_to_be_the_first(from_open_mpi):
    with pytest.raises(SystemExit, match=r"^mpirun started several hosts; .*-x MASTER_ADDR=HOST$"):
        from_open_mpi(MPI)
