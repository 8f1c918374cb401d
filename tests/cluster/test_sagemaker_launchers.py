"""SageMaker's own launchers, which `distribution=` of an estimator chooses, in real containers.

The toolkit's real runners start the scripts as they are, without our launcher.
"""

import re

import pytest
from conftest import SYSTEMS, TRAIN_DDP, TRAIN_HYMENOPTERA

from cluster.hosts import CONTAINERS

# Each mpirun runner of the toolkit sleeps for half a minute on the first host, and again on others.
pytestmark = [*CONTAINERS, pytest.mark.systems, pytest.mark.timeout(900)]

# What the Python SDK makes of `distribution=`, as hyperparameters.
PER_HOST = {"sagemaker_mpi_num_of_processes_per_host": 2}
MPI = {"sagemaker_mpi_enabled": True, **PER_HOST}
LAUNCHERS = {
    "mpi": MPI,
    "torch_distributed": {"sagemaker_torch_distributed_enabled": True, **PER_HOST},
    "pytorchddp": {"sagemaker_pytorch_ddp_enabled": True, **PER_HOST},
    "smdistributed": {"sagemaker_distributed_dataparallel_enabled": True, **PER_HOST},
}


def will_run(job, path, launcher, **hyperparameters):
    """Have a launcher of SageMaker's run a script and the modules beside it."""
    for host in job.values():
        for file in path.parent.glob("*.py"):
            host.write(f"source/{file.name}", file.read_text())
        host.hyperparameters = {
            "sagemaker_program": path.name,
            "sagemaker_submit_directory": "/opt/ml/source",
            **launcher,
            **hyperparameters,
        }


def test_mpi_collectives_as_the_document_starts_them(job, mpi_image):
    """Three hosts of two ranks, by the toolkit alone: no framework's module, and none of ours."""
    job.image = mpi_image
    job.add("algo-1", "algo-2", "algo-3")
    will_run(job, SYSTEMS / "mpi_collectives.py", MPI)
    for host in job.values():
        host.environment["SAGEMAKER_TRAINING_MODULE"] = ""
    job.start()
    assert set(job.wait(600).values()) == {0}, job.logs()
    log = job["algo-1"].log()
    assert log.count("every value is right") == 6, log
    assert {host.failure for host in job.values()} == {None}
