"""What SageMaker gives to each host: files and folders, under one of the job's; variables."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import LaunchError
from launcher.job.options import INTERNAL
from launcher.job.toolkit import BASE_DIR_VARIABLE
from launcher_tools.local_shares import Share

MODEL, OUTPUT, CHECKPOINTS = "model", os.path.join("output", "data"), "checkpoints"
FAILURE = os.path.join("output", "failure")
# Of another job: this process may itself run in a training container.
_PREFIXES = ("SM_", "SAGEMAKER_", "TRAINING_JOB_")


def make_run_dir(wanted: str, first_host: str) -> str:
    """Make a folder for the job; return its path: as wanted, or with `-2` ... if it is in use.

    Raises LaunchError if none can be made.
    """
    for number in itertools.count(1):
        path = f"{_named(wanted)}-{number}" if number > 1 else wanted
        try:
            os.makedirs(path, exist_ok=True)
            if not os.listdir(path):
                os.mkdir(os.path.join(path, first_host))  # nobody else has it from here on
                return path
        except FileExistsError:  # a file, or another job was faster
            continue
        except OSError as error:
            raise LaunchError(
                f"cannot make the folder {path} ({error.strerror}); "
                "give one that can be made with --run-dir."
            ) from None
    raise AssertionError


def _named(path: str) -> str:
    """Return the path of a folder that ends in its name: not in a slash or a dot."""
    path = path.rstrip("/")
    return os.path.abspath(path) if os.path.basename(path) in (".", "..") else path


def fill(
    run_dir: str,
    hosts: Sequence[str],
    channels: Mapping[str, str],
    hyperparameters: Mapping[str, str],
    interface: str,
) -> None:
    """Make each host's folders, and its config files with the keys that SageMaker gives them.

    Raises LaunchError if that is not possible.
    """
    group, kind = "homogeneousCluster", "local"
    members = {"instance_group_name": group, "instance_type": kind, "hosts": sorted(hosts)}
    channel = {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    }
    files: dict[str, dict[str, Any]] = {
        "resourceconfig": {
            "hosts": sorted(hosts),
            "network_interface_name": interface,
            "current_instance_type": kind,
            "current_group_name": group,
            "instance_groups": [members],
        },
        "hyperparameters": dict(hyperparameters),
        "inputdataconfig": dict.fromkeys(channels, channel),
    }
    try:
        for host in hosts:
            files["resourceconfig"]["current_host"] = host
            _fill_host(os.path.join(run_dir, host), channels, files)
    except OSError as error:
        raise LaunchError(f"cannot write {error.filename} ({error.strerror}).") from None


def _fill_host(base: str, channels: Mapping[str, str], files: Mapping[str, Any]) -> None:
    config, data = os.path.join("input", "config"), os.path.join("input", "data")
    for folder in (config, data, MODEL, OUTPUT, CHECKPOINTS, "code"):
        os.makedirs(os.path.join(base, folder), exist_ok=True)
    for channel, folder in channels.items():
        os.symlink(os.path.abspath(folder), os.path.join(base, data, channel))
    for name, content in files.items():
        with open(os.path.join(base, config, f"{name}.json"), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


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


def listed(run_dir: str, host: str, folder: str) -> Sequence[str]:
    """Return the names in one of a host's folders."""
    try:
        return sorted(os.listdir(os.path.join(run_dir, host, folder)))
    except OSError:
        return ()


def failure_reason(run_dir: str, host: str) -> str:
    """Return what SageMaker would show of a host's failure file, "" if there is none."""
    try:
        path = os.path.join(run_dir, host, FAILURE)
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1024)
    except OSError:
        return ""
