"""SageMaker's own launchers, which `distribution=` of an estimator chooses, in real containers.

The toolkit's real runners start the scripts, without our launcher.
"""

import pytest
from conftest import SYSTEMS, TRAIN_DDP, more

from cluster.hosts import CONTAINERS

pytestmark = CONTAINERS

# What the Python SDK 2.257 makes of `distribution=`: hyperparameters. It sets the number of
# processes for mpi alone; elsewhere it stands for the two GPUs that these hosts lack.
TWO = {"sagemaker_mpi_num_of_processes_per_host": 2}
INSTANCE = {"sagemaker_instance_type": "ml.c5.xlarge", **TWO}
LAUNCHERS = {
    "mpi": {"sagemaker_mpi_enabled": True, "sagemaker_mpi_custom_mpi_options": "", **TWO},
    "torch_distributed": {"sagemaker_torch_distributed_enabled": True, **INSTANCE},
    "pytorchddp": {"sagemaker_pytorch_ddp_enabled": True, **INSTANCE},
    "smdistributed": {
        "sagemaker_distributed_dataparallel_enabled": True,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "",
        **INSTANCE,
    },
}
# What shows in the log that it was this launcher.
SAYS = {
    "mpi": "mpirun --host algo-1:2,algo-2:2 -np 4 --allow-run-as-root --display-map",
    "torch_distributed": "Invoking TorchDistributed...",
    "pytorchddp": "Invoking SMDataParallel for native PT DDP job",
    "smdistributed": "-x SMDATAPARALLEL_SERVER_ADDR=algo-1",
}


def will_run(job, name, program, **hyperparameters):
    """Have a launcher of SageMaker's run one of all our scripts."""
    for host in job.values():
        for file in (*SYSTEMS.glob("*.py"), *TRAIN_DDP.parent.glob("*.py")):
            host.write(f"source/{file.name}", file.read_text())
        host.hyperparameters = {
            "sagemaker_program": program,
            "sagemaker_submit_directory": "/opt/ml/source",
            **LAUNCHERS[name],
            **hyperparameters,
        }


def test_mpi_collectives_as_the_document_starts_them(job, mpi_image):
    """Three hosts of two ranks, by the toolkit alone: no framework's module, and none of ours."""
    job.image = mpi_image
    job.add("algo-1", "algo-2", "algo-3")
    will_run(job, "mpi", "mpi_collectives.py")
    for host in job.values():
        host.environment["SAGEMAKER_TRAINING_MODULE"] = ""
    job.start()
    assert set(job.wait(600).values()) == {0}, job.logs()
    log = job["algo-1"].log()
    assert "mpirun --host algo-1:2,algo-2:2,algo-3:2 -np 6" in log
    assert all(f"rank {rank} of 6: every value is right" in log for rank in range(6)), log
    assert {host.failure for host in job.values()} == {None}


@pytest.mark.parametrize("name", [more("mpi"), more("pytorchddp"), *list(LAUNCHERS)[1::2]])
def test_train_ddp(job, mpi_image, name):
    job.image = mpi_image
    job.add("algo-1", "algo-2")
    run = {"epochs": 2, "samples": 512}
    if name == "torch_distributed":
        will_run(job, name, "train_ddp.py", **run)
    else:  # by the script that knows mpirun
        will_run(job, name, "under_mpirun.py", **run, **{"train-script": "train_ddp.py"})
    job.start()
    assert job.wait(600) == {"algo-1": 0, "algo-2": 0}, job.logs()
    log = job["algo-1"].log()
    assert SAYS[name] in log
    assert log.count("epoch=1 loss=") == 1
    assert (job["algo-1"].opt_ml / "model" / "model.pt").exists()
    assert not (job["algo-2"].opt_ml / "model" / "model.pt").exists()
