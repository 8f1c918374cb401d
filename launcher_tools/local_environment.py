"""The environment of a host's launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from launcher.job.options import INTERNAL
from launcher.job.toolkit import BASE_DIR_VARIABLE
from launcher_tools.local_shares import Share

# Of another job: this process may itself run in a training container.
_PREFIXES = ("SM_", "SAGEMAKER_", "TRAINING_JOB_")


def environment(
    environ: Mapping[str, str], base_dir: str, job_name: str, share: Share, ports: Sequence[int]
) -> dict[str, str]:
    """Return the variables of a host's launcher: those that SageMaker sets, and what it shares.

    The launcher makes the other `SM_*` variables of the files in base_dir (job/toolkit.py).
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_PREFIXES) and name not in INTERNAL
    }
    made = {
        BASE_DIR_VARIABLE: os.path.abspath(base_dir),
        "TRAINING_JOB_NAME": job_name,
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:local:000000000000:training-job/{job_name}",
        "SM_NUM_GPUS": str(len(share.gpus or ())),
    }
    if share.cpus:
        made["SM_NUM_CPUS"] = str(len(share.cpus))
    if share.gpus is not None:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    unless_set = {
        # As in AWS's images. Lines would come in blocks otherwise: stdout is a pipe.
        "PYTHONUNBUFFERED": "1",
        "LAUNCHER_RDZV_PORT": str(ports[0]),
        "LAUNCHER_PEER_PORT": str(ports[1]),
    }
    return {**unless_set, **kept, **made}
