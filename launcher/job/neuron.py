"""What is different on a host with Neuron cores (Trainium, Inferentia)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from launcher.errors import LaunchError, NotFoundError
from launcher.job.job import Cluster
from launcher.text.words import plural

COMPILE = "neuron_parallel_compile"
VARIABLE = "RUN_NEURON_PARALLEL_COMPILE"


def too_many(nproc: int, where: str, cluster: Cluster) -> LaunchError:
    """Return the error for more processes than Neuron cores; `where` names the setting.

    Each process takes cores for itself: without this error the last ones would fail late, in the
    Neuron runtime.
    """
    cores = cluster.num_neurons
    return LaunchError(
        f"{where} is {nproc}, but {cluster.current_host} has {plural(cores, 'Neuron core')} "
        f"(SM_NUM_NEURONS, else neuron-ls -j); expected at most {cores}, one core per process."
    )


def runner(environ: Mapping[str, str]) -> str:
    """Return the program that is to run torchrun, "" if torchrun is to run by itself.

    As in SageMaker's toolkit (torch_distributed.py), the value 1 alone asks for it. Raises
    LaunchError (exit code 127) if it is not installed.
    """
    if environ.get(VARIABLE) != "1":
        return ""
    if shutil.which(COMPILE, path=environ.get("PATH")) is None:
        raise NotFoundError(
            f"{VARIABLE} is 1, but {COMPILE} is not in PATH; install torch-neuronx, which "
            f"provides it, or unset {VARIABLE}.",
        )
    return COMPILE
