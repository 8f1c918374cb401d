"""Does what the SageMaker toolkit's `train` would have done, for an image without it.

Such an image only gets the files under /opt/ml/input/config. From them this module makes the same
`SM_*` variables and script arguments as sagemaker-training 5.1 (environment.py, mapping.py), so
that a script cannot tell the difference.

It also handles hyperparameters that nothing has turned into arguments although SM_HPS has them: SDK
v3 does not with `command` (aws/sagemaker-python-sdk#5226), nor does a shell script that the toolkit
runs and that omits "$@". v3's behaviour is taken from sagemaker-train 1.27.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.errors import LaunchError, UnexpectedError
from launcher.job import resources
from launcher.text.words import NAMED, join_and_count, printable

BASE_DIR_VARIABLE = "SAGEMAKER_BASE_DIR"
# The platform's own hyperparameters, which never reach the script (toolkit's params.py).
_OWN_PREFIX = "sagemaker_"
_OWN_KEYS = ("_tuning_objective_metric", "default_user_module_name")
# Those that the toolkit handles itself; the others are "framework parameters".
_HANDLED = ["program", "submit_directory", "region", "job_name", "s3_output"]
_HANDLED += ["enable_cloudwatch_metrics", "container_log_level"]
_HANDLED_KEYS = {*_OWN_KEYS, *(_OWN_PREFIX + name for name in _HANDLED)}
START_WORD = "train"  # with which SageMaker starts an image


class TrainingConfig(NamedTuple):
    """The three files of /opt/ml/input/config, parsed."""

    hyperparameters: Mapping[str, Any]  # the user's; values JSON-decoded if they were JSON
    framework_params: Mapping[str, Any]  # the platform's: keys that begin with sagemaker_
    resource_config: Mapping[str, Any]
    input_data_config: Mapping[str, Any]


class JobInput(NamedTuple):
    """SageMaker's description of the job, in whatever form."""

    words: Sequence[str]  # the arguments, hyperparameters first
    variables: Mapping[str, str] = {}  # that the toolkit's `train` would have added
    lines: Sequence[str] = ()  # for the log
    # What an error in the job adds: that SM_HPS alone names the script, or which files were read.
    hint: str = ""
    home: str = ""  # the folder where `train` would have put the code and run


def read_input(argv: Sequence[str], environ: Mapping[str, str]) -> JobInput:
    """Return the job as the arguments, the environment and SageMaker's files describe it.

    The files count if neither the toolkit nor SDK v3 has made variables from them. Raises
    LaunchError.
    """
    words, lines = list(argv), []
    if words[:1] == [START_WORD]:
        words.pop(0)
        if words:
            lines.append(
                f"the first argument, {START_WORD}, is how SageMaker starts an image, so it is not "
                "passed to the script (to pass it, put it after another argument)."
            )
    config = None if "SM_HOSTS" in environ else read_config(environ)
    if config is None:
        if not words and (words := as_arguments(environ)):
            lines.append("started without arguments: using the hyperparameters (SM_HPS).")
        lost = not_passed(words, environ)
        is_hint = "train-script" in lost or "train-module" in lost
        return JobInput(words, {}, [*lines, *filter(None, [lost])], lost if is_hint else "")
    words = [*to_cmd_args(config.hyperparameters), *words]
    made = to_env_vars(config, environ)
    made = {name: text for name, text in made.items() if name not in environ}
    hint = f"(Hyperparameters and SM_ variables were made from {config_dir(base_dir(environ))}.)"
    return JobInput(words, made, lines, hint, os.path.abspath(code_dir(environ)))


def base_dir(environ: Mapping[str, str]) -> str:
    """Return /opt/ml, or the folder that SAGEMAKER_BASE_DIR names instead."""
    return environ.get(BASE_DIR_VARIABLE) or os.path.join("/opt", "ml")


def config_dir(base: str) -> str:
    """Return the folder of the config files below /opt/ml, or below the folder in its place."""
    return os.path.join(base, "input", "config")


def code_dir(environ: Mapping[str, str]) -> str:
    """Return the folder for the user's code, /opt/ml/code."""
    return os.path.join(base_dir(environ), "code")


def read_config(environ: Mapping[str, str]) -> TrainingConfig | None:
    """Read the config files of the training container; return None if their folder does not exist.

    Raises LaunchError if the folder exists and a file is missing, unreadable, not JSON or not of
    the expected form, and if SAGEMAKER_BASE_DIR names a folder without it.
    """
    base = base_dir(environ)
    folder = config_dir(base)
    if not os.path.isdir(folder):
        if environ.get(BASE_DIR_VARIABLE):
            raise LaunchError(
                f"{folder} does not exist; expected the config files of a training job in it "
                f"({BASE_DIR_VARIABLE} names the folder above input/config, else it is /opt/ml)."
            )
        return None
    resource_config = _read_object(folder, "resourceconfig.json")
    for key in ("current_host", "hosts"):
        if key not in resource_config:
            raise LaunchError(f"{folder}/resourceconfig.json has no {key!r}; expected one.")
    values = _read_object(folder, "hyperparameters.json")
    values = {key: decoded(value) for key, value in values.items()}
    return TrainingConfig(
        hyperparameters={key: values[key] for key in values if not is_platforms_own(key)},
        framework_params={key: values[key] for key in values if is_platforms_own(key)},
        resource_config=resource_config,
        input_data_config=_read_object(folder, "inputdataconfig.json"),
    )


def _read_object(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UnexpectedError(path, value, "a JSON object")
    return value


def is_platforms_own(key: str) -> bool:
    """Tell whether a hyperparameter is SageMaker's own, which never reaches the script."""
    return key.startswith(_OWN_PREFIX) or key in _OWN_KEYS


def decoded(value: Any) -> Any:
    """Undo the SDK's JSON encoding of a hyperparameter; return what is not JSON as it is."""
    try:
        return json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return value


def to_cmd_args(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Render hyperparameters as the toolkit does: sorted, always `--key value`."""
    args = []
    for key, value in sorted(hyperparameters.items()):
        args.append(f"--{key}" if len(key) > 1 else f"-{key}" if key else "")
        if isinstance(value, dict):
            args.append(",".join(f"{name}={item}" for name, item in sorted(value.items())))
        else:
            args.append("" if value is None else str(value))
    return args


def to_env_vars(config: TrainingConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the toolkit would make from these files.

    `SM_*` as its Environment names them, except those that only its own distributions use, and
    those without that prefix. Raises LaunchError if the instance groups of resourceconfig.json are
    invalid.
    """
    params, hyperparameters = config.framework_params, config.hyperparameters
    others = {key: value for key, value in params.items() if key not in _HANDLED_KEYS}
    data = os.path.join(base_dir(environ), "input", "data")
    channels = {name: os.path.join(data, name) for name in config.input_data_config}
    topology = config.resource_config.get("topology", [])
    values = _values(config, environ)
    training_env = {
        **values,
        "hyperparameters": hyperparameters,
        "additional_framework_parameters": others,
        "channel_input_dirs": channels,
        "topology": topology,
        "job_name": environ.get("TRAINING_JOB_NAME"),
    }
    variables = {
        **values,
        "training_env": training_env,
        "hps": hyperparameters,
        "framework_params": others,
        "user_args": to_cmd_args(hyperparameters),
        "channels": sorted(channels),
        **({"topology": topology} if topology else {}),
        **{f"channel_{name}": path for name, path in channels.items()},
        **{f"hp_{key}": value for key, value in hyperparameters.items()},
    }
    more = {
        "CURRENT_HOST": values["current_host"],
        "SAGEMAKER_JOB_NAME": params.get("sagemaker_job_name"),
        "SAGEMAKER_REGION": params.get("sagemaker_region") or environ.get("AWS_DEFAULT_REGION"),
    }
    return {
        **{f"SM_{name.upper()}": _env_value(value) for name, value in variables.items()},
        **{name: str(value) for name, value in more.items() if value},
    }


def _values(config: TrainingConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that both SM_TRAINING_ENV and a variable of their name have."""
    resource_config, params = config.resource_config, config.framework_params
    groups = instance_groups(resource_config)
    group = resource_config.get("current_group_name", "homogeneousCluster")
    instance_type = resource_config.get("current_instance_type", "local")
    gpus = resources.count("SM_NUM_GPUS", environ)
    program = str(params.get("sagemaker_program"))
    path = functools.partial(os.path.join, base_dir(environ))
    return {
        "resource_config": resource_config,
        "input_data_config": config.input_data_config,
        "hosts": resource_config["hosts"],
        "current_host": resource_config["current_host"],
        "current_instance_type": instance_type,
        "current_instance_group": group,
        "current_instance_group_hosts": groups.get(str(group), {}).get("hosts", []),
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "distribution_instance_groups": params.get("sagemaker_distribution_instance_groups", []),
        "network_interface_name": resource_config.get("network_interface_name", "eth0"),
        "num_cpus": resources.count("SM_NUM_CPUS", environ) or os.cpu_count() or 1,
        "num_gpus": len(resources.gpus(environ)) if gpus is None else gpus,
        "num_neurons": resources.count_neuron_cores(str(instance_type), environ),
        "user_entry_point": params.get("sagemaker_program"),
        "module_name": program.removesuffix(".py"),
        "module_dir": params.get("sagemaker_submit_directory", code_dir(environ)),
        "log_level": params.get("sagemaker_container_log_level", 20),
        "framework_module": environ.get("SAGEMAKER_TRAINING_MODULE"),
        "input_dir": path("input"),
        "input_config_dir": config_dir(base_dir(environ)),
        "model_dir": path("model"),
        "output_dir": path("output"),
        "output_data_dir": path("output", "data"),
        "output_intermediate_dir": path("output", "intermediate"),
    }


def instance_groups(resource_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the instance groups by their names, as in the toolkit's SM_INSTANCE_GROUPS_DICT.

    Raises LaunchError if they are not a list of objects with names.
    """
    groups = resource_config.get("instance_groups") or []
    try:
        return {str(group["instance_group_name"]): dict(group) for group in groups}
    except (TypeError, KeyError, ValueError):
        expected = "a list of objects with instance_group_name and hosts"
        raise UnexpectedError("instance_groups of resourceconfig.json", groups, expected) from None


def _env_value(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def as_arguments(environ: Mapping[str, str]) -> list[str]:
    """Return all hyperparameters as the toolkit renders them, or v3: `--key JSON`, in their order.

    Raises LaunchError if SM_HPS is set and is no JSON object.
    """
    words = decoded(environ.get("SM_USER_ARGS"))
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return words  # the toolkit's own
    hyperparameters = _hyperparameters(environ)
    if hyperparameters is None:
        raise LaunchError(
            "SM_HPS is not a JSON object; expected the hyperparameters as a JSON object."
        )
    return [
        word for key, value in hyperparameters.items() for word in (f"--{key}", _rendered(value))
    ]


def not_passed(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a line that names the hyperparameters missing from the arguments, "" if none is."""
    typed = set(map(_name, argv))
    keys = [key for key in _hyperparameters(environ) or {} if not is_platforms_own(key)]
    lost = [key for key in keys if _name(key) not in typed]
    names = printable(join_and_count(lost[:NAMED], len(lost[NAMED:])))
    return f"these hyperparameters (SM_HPS) are not among the arguments: {names}." if lost else ""


def _hyperparameters(environ: Mapping[str, str]) -> dict[str, Any] | None:
    value = decoded(environ.get("SM_HPS") or "{}")
    return value if isinstance(value, dict) else None


def _rendered(value: Any) -> str:
    value = decoded(value)  # v3 does so once more
    return value if isinstance(value, str) else json.dumps(value)


def _name(word: str) -> str:
    """Return the name in `key`, `--key`, `--key=value`, `-k`, and hydra's `key=value`."""
    return word.partition("=")[0].lstrip("-+").replace("_", "-")
