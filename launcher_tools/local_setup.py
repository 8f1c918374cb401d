"""Each host's share of this machine, and its substitute for SageMaker.

A share is an address, cores and GPUs; SageMaker provides files, folders and variables.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from launcher.errors import LaunchError
from launcher.host.cgroups import read_text
from launcher.job import resources, toolkit
from launcher.job.options import INTERNAL

_T = TypeVar("_T")
# Below Linux's ephemeral ports (ip(7), ip_local_port_range): the kernel gives them to nobody.
_PORTS = range(20000, 29000)
# A host's folders for a job's results, and the file with the failure reason.
RESULTS = ("model", os.path.join("output", "data"), "checkpoints")
FAILURE = os.path.join("output", "failure")
# Another job's variables: this process may itself run in a training container.
_PREFIXES = ("SM_", "SAGEMAKER_", "TRAINING_JOB_", "CURRENT_HOST")
_OPTION = r"-(?!(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$).+"  # and no negative number


class Share(NamedTuple):
    """One host's part of this machine."""

    address: str
    cpus: frozenset[int]  # for its processes
    cores: int  # physical ones
    gpus: tuple[str, ...] | None  # UUIDs; None: this machine has none


def shares(count: int, environ: Mapping[str, str]) -> list[Share]:
    """Divide this machine among `count` equal hosts, as on SageMaker.

    A host sees its GPUs by their UUIDs (in MIG mode, those of slices): with numbers, the second
    host's would not begin at 0. Raises LaunchError if there are fewer loopback addresses.
    """
    found = addresses(count)
    visible = resources.visible_gpus(resources.gpus(environ), environ)
    gpus = [device for gpu in visible for device in gpu.devices]
    parts = divided(gpus, count) if len(gpus) >= count else [()] * count
    return [
        Share(address, frozenset(itertools.chain(*own)), len(own), tuple(part) if gpus else None)
        for address, own, part in zip(found, divided(resources.physical_cores(), count), parts)
    ]


def divided(things: Sequence[_T], count: int) -> list[Sequence[_T]]:
    """Return equal parts; if there are fewer things than parts, some parts are the same."""
    if len(things) < count:
        return [[things[number % len(things)]] for number in range(count)]
    size = len(things) // count
    return [things[number * size : (number + 1) * size] for number in range(count)]


def addresses(count: int) -> list[str]:
    """Return `count` loopback addresses of this machine, 127.0.0.1 first.

    Raises LaunchError, which says how to add them.
    """
    found = [f"127.0.0.{number}" for number in range(1, count + 1)]
    for address in found:
        if problem := _problem(address, 0):
            raise LaunchError(
                f"{address} is not an address of this machine ({problem}); add all up to "
                f"{found[-1]} as root: `ip address add {address}/8 dev lo`."
            )
    return found


def free_ports() -> list[str]:
    """Return two free ports, at random: two jobs at the same time get different ones.

    Raises LaunchError if there are fewer.
    """
    ports = random.SystemRandom().sample(_PORTS, len(_PORTS))
    free = (str(port) for port in ports if not _problem("", port))
    found = list(itertools.islice(free, 2))
    if len(found) < 2:
        raise LaunchError(f"no two ports from {_PORTS[0]} on are free; end programs that use them.")
    return found


def _problem(address: str, port: int) -> str:
    """Return why no process can listen there, "" if one can."""
    try:
        with socket.socket() as probe:
            probe.bind((address, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


# Files, folders, variables


def make_run_dir(wanted: str, first_host: str) -> str:
    """Make a folder for the job; return its path: as wanted, or with `-2` ... if it is in use.

    Raises LaunchError if none can be made.
    """
    wanted = wanted if os.path.basename(wanted) not in (".", "..") else os.path.abspath(wanted)
    for number in itertools.count(1):
        path = f"{wanted.rstrip('/')}-{number}" if number > 1 else wanted
        try:
            os.makedirs(path, exist_ok=True)
            if not os.listdir(path):
                os.mkdir(os.path.join(path, first_host))  # from here on it is ours
                return path
        except FileExistsError:  # a file, or another job was faster
            continue
        except OSError as error:
            raise LaunchError(
                f"cannot create the folder {path} ({error.strerror}); choose another with "
                "--run-dir."
            ) from None
    raise AssertionError


def fill(
    run_dir: str,
    hosts: Sequence[str],
    channels: Mapping[str, str],
    hyperparameters: Mapping[str, str],
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
            "network_interface_name": "lo",
            "current_instance_type": kind,
            "current_group_name": group,
            "instance_groups": [members],
        },
        "hyperparameters": dict(hyperparameters),
        "inputdataconfig": dict.fromkeys(channels, channel),
    }
    config, data = toolkit.config_dir(""), os.path.join("input", "data")
    try:
        for host in hosts:
            base = os.path.join(run_dir, host)
            for folder in (config, data, *RESULTS, "code"):
                os.makedirs(os.path.join(base, folder), exist_ok=True)
            for name, folder in channels.items():
                os.symlink(os.path.abspath(folder), os.path.join(base, data, name))
            files["resourceconfig"]["current_host"] = host
            for name, content in files.items():
                path = os.path.join(base, config, f"{name}.json")
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=1)
    except OSError as error:
        raise LaunchError(f"cannot write {error.filename} ({error.strerror}).") from None


def environment(
    environ: Mapping[str, str], base_dir: str, job_name: str, share: Share, ports: Sequence[str]
) -> dict[str, str]:
    """Return the variables of a host's launcher: those that SageMaker sets, and its share.

    The launcher makes the other `SM_*` variables from the files in base_dir (job/toolkit.py).
    """
    own = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_PREFIXES) and name not in INTERNAL
    }
    made = {
        toolkit.BASE_DIR_VARIABLE: os.path.abspath(base_dir),
        "TRAINING_JOB_NAME": job_name,
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:local:000000000000:training-job/{job_name}",
        "SM_NUM_GPUS": str(len(share.gpus or ())),
        "SM_NUM_CPUS": str(len(share.cpus)),
    }
    if share.gpus is not None:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    # In place of the toolkit's folder of the code, which here is the current folder.
    folders = [os.getcwd(), environ.get("PYTHONPATH", "")]
    made["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    unless_set = {
        # As in AWS's images. Otherwise lines would arrive in blocks: stdout is a pipe.
        "PYTHONUNBUFFERED": "1",
        "LAUNCHER_RDZV_PORT": ports[0],
        "LAUNCHER_PEER_PORT": ports[1],
    }
    return {**unless_set, **own, **made}


def listed(run_dir: str, host: str, folder: str) -> Sequence[str]:
    """Return the names in one of a host's folders."""
    path = os.path.join(run_dir, host, folder)
    return sorted(os.listdir(path)) if os.path.isdir(path) else ()


def failure_reason(run_dir: str, host: str) -> str:
    """Return what SageMaker would show of a host's failure file, "" if there is none."""
    return read_text(os.path.join(run_dir, host, FAILURE))[:1024]


# Hyperparameters


def as_hyperparameters(args: Sequence[str]) -> tuple[dict[str, str], str]:
    """Read `--key value`, `--key=value` and `-k value`, each key once.

    Return the hyperparameters, and the first argument that cannot be one, "" if all can.
    """
    found: dict[str, str] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        match = re.fullmatch(r"--([^-].*)|-([^-\d.])", key, re.DOTALL)
        name = match[match.lastindex or 0] if match else ""
        if not name or name in found or toolkit.is_platforms_own(name):
            return {}, word
        if not equals:
            if not rest or re.fullmatch(_OPTION, rest[0], re.IGNORECASE | re.DOTALL):
                return {}, word
            value = rest.pop(0)
        found[name] = value
    return found, ""


def changes(args: Sequence[str], hyperparameters: Mapping[str, str]) -> list[str]:
    """Return the arguments that SageMaker would change, with their new form."""
    changed = []
    for name, text in sorted(hyperparameters.items()):
        has_two = any(word.partition("=")[0] == f"--{name}" for word in args)  # dashes
        typed = f"{'--' if has_two else '-'}{name}"
        key, value = toolkit.to_cmd_args({name: toolkit.decoded(text)})
        if (key, value) != (typed, text):
            changed.append(f"{typed} {text} becomes {key} {value or repr('')}")
    return changed
