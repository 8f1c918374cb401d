"""Joins the process group of a job, whoever started its ranks, and leaves it. Needs torch alone.

device = join_group()  # gloo on CPU, nccl where each rank of this host has a GPU
try:
    ...
finally:
    leave_group()
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist

BACKENDS = ("auto", "gloo", "nccl", "smddp", "xla")


def join_group(backend="auto"):
    """Join the group that torchrun's variables describe, or else mpirun's; return our device.

    Without either (plain `python script.py`) the group is this process alone.
    """
    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ.update(from_open_mpi(os.environ))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if backend == "auto":
        backend = "nccl" if gpus >= ranks_here else "gloo"
    elif backend == "nccl" and gpus < ranks_here:
        end_host(f"nccl needs a GPU per rank: {gpus} GPUs, {ranks_here} ranks; use --backend gloo")
    elif backend == "smddp":
        _import(backend, "smdistributed.dataparallel.torch.torch_smddp")
    elif backend == "xla":
        _import(backend, "torch_xla.distributed.xla_backend")
    if backend == "xla":
        device = importlib.import_module("torch_xla").device()
    elif backend == "nccl" or (backend == "smddp" and gpus >= ranks_here):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def leave_group():
    """Destroy the process group, in main()'s `finally`, once its threads have nothing left to do.

    DistributedDataParallel refers to itself, and the frames of an error or a stop hold it. While it
    lives, so do gloo's threads, and one that frees its last work too late aborts the process at
    exit (torch 2.13, 1 run in 10). destroy_process_group() waits for them with Python's lock, which
    one that still has a tensor to free waits for in turn (torch 2.4): a deadlock.
    """
    traceback.clear_frames(sys.exc_info()[2])
    gc.collect()
    time.sleep(0.1)  # without the lock
    dist.destroy_process_group()


def end_step(device):
    """Have torch_xla run the step that it has recorded; other devices have begun it by now."""
    if device.type == "xla":
        sys.modules["torch_xla"].sync()


def from_open_mpi(environ):
    """Return torchrun's variables for a rank that Open MPI's mpirun started.

    mpirun names no first host. SageMaker does, in SM_HOSTS; its smdistributed launcher in a
    variable of its own.
    """
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE"}
    names.update(LOCAL_RANK="LOCAL_RANK", LOCAL_WORLD_SIZE="LOCAL_SIZE")
    variables = {name: environ[f"OMPI_COMM_WORLD_{theirs}"] for name, theirs in names.items()}
    first = environ.get("MASTER_ADDR") or environ.get("SMDATAPARALLEL_SERVER_ADDR")
    if not first and environ.get("SM_HOSTS"):
        first = json.loads(environ["SM_HOSTS"])[0]
    if not first and variables["LOCAL_WORLD_SIZE"] == variables["WORLD_SIZE"]:
        first = "localhost"
    if not first:
        end_host("mpirun started several hosts; tell ranks the first: mpirun -x MASTER_ADDR=HOST")
    port = environ.get("MASTER_PORT") or "29500"
    return {**variables, "MASTER_ADDR": first, "MASTER_PORT": port}


def end_host(message):
    """End this rank, as all ranks of this host do; the first of them says why."""
    sys.exit(message if says_why() else 1)


def says_why():
    """Tell whether this rank, its host's first, is to say why all end; on others, wait for it.

    torchrun and mpirun end all ranks, and report the one that ended first, even if the rank that
    says why is still importing torch.
    """
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if int(os.environ.get(name, 0)) > 0:
            time.sleep(5)
            return False
    return True


def end_together(error, group=None):
    """End all ranks if rank 0 has an error; none is left waiting in a collective."""
    errors = [error]
    dist.broadcast_object_list(errors, 0, group=group)
    if errors[0]:
        end_host(errors[0])


def _import(backend, module):
    try:
        importlib.import_module(module)
    except ImportError as error:
        end_host(f"--backend {backend} is not installed here ({error}); use --backend auto")
