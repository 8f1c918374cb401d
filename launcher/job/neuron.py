"""What is different on a host with Neuron cores (Trainium, Inferentia)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence

from launcher.errors import LaunchError, NotFoundError
from launcher.job.job import Cluster
from launcher.job.options import ARGUMENTS
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
        f"(SM_NUM_NEURONS, else neuron-ls -j); expected at most {cores}, a core for each process."
    )


def compiles(environ: Mapping[str, str]) -> bool:
    """Tell whether neuron_parallel_compile is to run the job, once, to collect its graphs.

    As in SageMaker's toolkit (torch_distributed.py), the value 1 alone asks for it. Raises
    LaunchError (exit code 127) if it is not installed.
    """
    if environ.get(VARIABLE) != "1":
        return False
    if shutil.which(COMPILE, path=environ.get("PATH")) is None:
        raise NotFoundError(
            f"{VARIABLE} is 1, but {COMPILE} is not in PATH; install torch-neuronx, which brings "
            f"it, or unset {VARIABLE}.",
        )
    return True


def command(
    launcher: Sequence[str], argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command, and its environment, that runs this launcher again below the program.

    The program passes no signal on and has exit codes of its own, so an init runs it (init.py). It
    takes some arguments for its own: the launcher's are in the environment, which also says that
    this is the launcher below.
    """
    words = [*launcher, "init", COMPILE, *launcher]
    return words, {**environ, ARGUMENTS: json.dumps(list(argv))}
