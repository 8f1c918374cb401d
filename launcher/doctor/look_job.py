"""What the launcher would run here, by the same steps as a job (job/prepare.py)."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from launcher.doctor.facts import JobFacts
from launcher.errors import LaunchError
from launcher.job import arguments, resources, toolkit
from launcher.job.plan import LaunchPlan
from launcher.job.prepare import Prepared, prepare

# Stands for the script if none is named: a module of Python's own. It is never started.
_ANY = ("--train-module", "site")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_TARGETS = {"train-script", "train-module"}


def look_at_job(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[JobFacts, Prepared | None]:
    """Return what a job with these arguments would do, and the plan; nothing is started or made."""
    argv = [] if list(argv) == ["train"] else argv  # SageMaker's word
    names_script = _names_script(argv, environ)
    facts = JobFacts(
        names_script=names_script,
        pet=tuple(sorted(name for name in environ if name.startswith("PET_") and environ[name])),
        users_interfaces={name: environ[name] for name in _INTERFACES if environ.get(name)},
    )
    try:
        facts = facts._replace(
            on_sagemaker="SM_HOSTS" in environ or toolkit.read_config(environ) is not None,
            distribution=_distribution(environ),
        )
        words = argv if names_script else [*argv, *_ANY]
        prepared = prepare(words, {**environ, **_without_effects(environ)})
    except LaunchError as error:
        return facts._replace(error=str(error)), None
    if prepared is None:
        summary = "this host is in none of the instance groups that take part"
        return facts._replace(takes_part=False, summary=summary), None
    return _of_prepared(facts, prepared, environ), prepared


def _without_effects(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which prepare makes no folder, and looks no name up."""
    made = {"LAUNCHER_DRY_RUN": "true"}
    interface = environ.get("SM_NETWORK_INTERFACE_NAME", "")
    config = None if "SM_HOSTS" in environ else toolkit.read_config(environ)
    if config:
        interface = str(config.resource_config.get("network_interface_name", ""))
    if interface not in resources.network_interfaces():
        # A look-up can take a minute, and a job of launchers that talk does without it.
        made["GLOO_SOCKET_IFNAME"] = environ.get("GLOO_SOCKET_IFNAME", "")
    return made


def _of_prepared(facts: JobFacts, prepared: Prepared, environ: Mapping[str, str]) -> JobFacts:
    cluster, chosen, plan = prepared
    facts = facts._replace(
        hosts=cluster.hosts,
        current_host=cluster.current_host,
        num_gpus=cluster.num_gpus,
        num_neurons=cluster.num_neurons,
        unknown=chosen.unknown_twins,
        peers=chosen.peers,
        start_timeout=chosen.start_timeout,
        grace=chosen.grace,
        failure_grace=chosen.failure_grace,
        network_interface_name=cluster.network_interface_name,
    )
    if not isinstance(plan, LaunchPlan):
        return facts._replace(error=str(plan))
    facts = facts._replace(error=_cannot_be_passed(plan, environ))
    return facts._replace(
        nproc_per_node=plan.nproc_per_node,
        grace=plan.grace,
        chosen_interfaces={
            name: value for name, value in plan.environment.items() if name in _INTERFACES
        },
        summary=" ".join(plan.summary()),
        said=plan.remarks,
    )


def _cannot_be_passed(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """Return why the kernel takes no process with these arguments and variables, "" if it does."""
    command = (sys.executable, "-I", "-S", "-c", "", *plan.argv)
    try:
        subprocess.run(
            command, env={**environ, **plan.environment}, check=False, capture_output=True
        )
    except OSError as error:
        if error.errno == errno.E2BIG:
            most = "one of at most 128 KiB, all of a few MiB (execve(2))"
            return f"the arguments and variables of the job are too long; expected {most}."
    return ""


def _names_script(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether a script or module is named, or something else that prepare has to refuse."""
    try:
        ours, scripts = arguments.split(argv)
        config = None if "SM_HOSTS" in environ else toolkit.read_config(environ)
    except LaunchError:
        return True
    typed = {word.partition("=")[0].lstrip("-") for word in ours}
    return bool(scripts or _TARGETS & (typed | set(config.hyperparameters if config else ())))


def _distribution(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the SDK's distribution= switches on, as the toolkit's hyperparameters."""
    if environ.get("SAGEMAKER_TRAINING_MODULE") == "sm_launch:train":
        return ()  # the toolkit runs the launcher, whatever they are (training.py)
    config = None if "SM_HOSTS" in environ else toolkit.read_config(environ)
    params = config.framework_params if config else {}
    try:
        params = {**params, **json.loads(environ.get("SM_FRAMEWORK_PARAMS") or "{}")}
    except (ValueError, TypeError):
        pass  # the toolkit's own; a job does not read it
    on = (name for name, value in params.items() if name.endswith("_enabled") and value is True)
    return tuple(sorted(on))
