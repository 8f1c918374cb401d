"""What each check gets, PlannedJob, and what it yields, ReportLine; the checks of the job itself.

Those are its settings and its plan: what the launcher would run here. The limits of time for what
may hang are here, too: for all checks.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launcher.errors import LaunchError
from launcher.host.child import Child
from launcher.job import arguments, toolkit
from launcher.job.job import Cluster, Job, LaunchPlan
from launcher.job.options import Options
from launcher.job.plan import SAGEMAKER_KILLS_AFTER
from launcher.job.prepare import prepare
from launcher.text.words import flag

# How bad a finding is; only the last one changes the exit code.
OK, WARNING, PROBLEM = "ok", "warning", "problem"
# Stands for the script if none is named: a module of Python's own. It is never started.
_ANY = ("--train-module", "site")
_TARGETS = {"train-script", "train-module"}
_END_SECONDS = 10  # that torchrun and the launcher need after the ranks
# How long each may take: nvidia-smi; the plan, which asks nvidia-smi and neuron-ls; the import of
# torch, which can take most of a minute from a new disk; names; one connection; and all that is
# found of the network and of file systems, which gives names their whole time.
DRIVER_SECONDS, PLAN_SECONDS, TORCH_SECONDS, NAMES_SECONDS, CONNECT_SECONDS = 15, 20, 60, 10, 2
HOST_SECONDS = 2 * NAMES_SECONDS


class ReportLine(NamedTuple):
    """One line of the report. `to_do` is empty if all is well."""

    check: str
    level: str  # OK, WARNING or PROBLEM
    seen: str
    to_do: str = ""


def ok(check: str, seen: str) -> ReportLine:
    """Return the finding that all is well."""
    return ReportLine(check, OK, seen)


def warning(check: str, seen: str, to_do: str) -> ReportLine:
    """Return the finding that a job would run, but not well."""
    return ReportLine(check, WARNING, seen, to_do)


def problem(check: str, seen: str, to_do: str) -> ReportLine:
    """Return the finding that a job would fail."""
    return ReportLine(check, PROBLEM, seen, to_do)


class PlannedJob(NamedTuple):
    """A job as its own first steps have planned it; each default stands for "not known"."""

    cluster: Cluster = Cluster((), "", "", 0, 0, "")
    options: Options = Options()
    plan: LaunchPlan | None = None
    error: str = ""  # why it would not start
    takes_part: bool = True  # this host
    names_script: bool = True

    @property
    def is_first(self) -> bool:
        """Whether the other hosts meet at this one."""
        return self.cluster.hosts[:1] == (self.cluster.current_host,)

    @property
    def ranks(self) -> int:
        """The number of ranks of this host; torchrun's words stand for its GPUs, at least one."""
        count = self.plan.nproc_per_node if self.plan else ""
        return int(count) if count.isdecimal() else self.cluster.num_gpus or 1

    def keeps_store(self, environ: Mapping[str, str]) -> bool:
        """Tell whether torchrun's store is on the first host, at --launcher-rdzv-port."""
        return not environ.get("PET_RDZV_ENDPOINT") or "rdzv_port" in self.options.given

    def words_for_torchrun(self) -> Sequence[str]:
        """Return torchrun's arguments if the user has some for it, which it may refuse.

        All others are the launcher's own.
        """
        if self.plan is None or not self.options.torchrun_args:
            return ()
        return self.plan.argv[self.plan.argv.index("torch.distributed.run") + 1 :]


def plan_job(argv: Sequence[str], environ: Mapping[str, str]) -> PlannedJob:
    """Return what a job with these arguments would do, by the same steps; it makes nothing."""
    names_script = True
    try:
        config = None if "SM_HOSTS" in environ else toolkit.read_config(environ)
        argv = arguments.without_start_word(argv)
        if not argv and config is None:
            words = toolkit.as_arguments(environ)
            argv = words if _TARGETS & {word[2:] for word in words} else argv
        names_script = _names_script(argv, config)
        if not names_script:  # arguments of a job that is not this command's
            environ = {**environ, "SM_HPS": ""}
        words = argv if names_script else [*argv, *_ANY]
        # With this variable it makes no folder.
        prepared = prepare(words, {**environ, "LAUNCHER_DRY_RUN": "true"})
    except LaunchError as error:
        return PlannedJob(error=str(error), names_script=names_script)
    if prepared is None:
        return PlannedJob(takes_part=False)
    cluster, options, plan = prepared
    if isinstance(plan, LaunchError):
        return PlannedJob(cluster, options, error=str(plan), names_script=names_script)
    if isinstance(plan, Exception):
        raise plan  # a mistake of the launcher's own
    too_long = _cannot_be_passed(plan, environ)
    return PlannedJob(cluster, options, plan, too_long, names_script=names_script)


def _names_script(argv: Sequence[str], config: toolkit.TrainingConfig | None) -> bool:
    """Tell whether a script or module is named, or something else that prepare has to refuse."""
    try:
        ours, scripts = arguments.split(argv)
    except LaunchError:
        return True
    typed = {word.partition("=")[0].lstrip("-") for word in ours}
    return bool(scripts or _TARGETS & {*typed, *(config.hyperparameters if config else ())})


def _cannot_be_passed(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """Return why the kernel takes no process with these arguments and variables, "" if it does."""
    command = (sys.executable, "-I", "-S", "-c", "", *plan.argv)
    answer = Child(command, {**environ, **plan.environment}).answer(PLAN_SECONDS)
    if not answer.was_started and os.strerror(errno.E2BIG) in answer.problem:
        most = "one of at most 128 KiB, all of a few MiB (execve(2))"
        return f"the arguments and variables of the job are too long; expected {most}."
    return ""


def settings(
    job: PlannedJob, environ: Mapping[str, str], said: Sequence[str]
) -> Iterator[ReportLine]:
    """Say what the environment sets, and what the launcher does; `said` is what it has logged."""
    lines = [*said, *(job.plan.remarks if job.plan else ())]
    unknown = job.options.unknown_twins
    distribution = _distribution(environ)
    if distribution:
        how = problem if _is_installed("sagemaker-training") else warning
        yield how(
            "settings",
            f"the estimator's distribution= is set ({', '.join(distribution)}): "
            "SageMaker's toolkit would start another launcher",
            "remove distribution= from the estimator",
        )
    most = SAGEMAKER_KILLS_AFTER - _END_SECONDS
    if job.options.grace > most:
        seen = f"{job.options.grace} s to save, but SageMaker kills everything "
        seen += f"{SAGEMAKER_KILLS_AFTER} s after a stop"
        yield warning("settings", seen, f"use at most {flag('grace')} {most}")
    pet = sorted(name for name in environ if name.startswith("PET_") and environ[name])
    pet = [name for name in pet if not any(name in line for line in lines)]
    if pet:
        yield ok("settings", f"{', '.join(pet)}: passed to torchrun as you set it")
    for name in unknown:
        seen = f"{name} is not a launcher option"
        yield warning("settings", seen, "correct it (--launcher-help), or remove it")
    for line in lines:
        if not any(name in line for name in unknown):
            yield ok("settings", line.rstrip("."))


def _is_installed(name: str) -> bool:
    from importlib import metadata

    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _distribution(environ: Mapping[str, str]) -> list[str]:
    """Return what the SDK's distribution= switches on, as the toolkit's hyperparameters."""
    if environ.get("SAGEMAKER_TRAINING_MODULE") == "sm_launch:train":
        return []  # the toolkit runs the launcher, whatever they are (training.py)
    params: dict[str, object] = {}
    try:
        config = None if "SM_HOSTS" in environ else toolkit.read_config(environ)
        params.update(config.framework_params if config else {})
        params.update(json.loads(environ.get("SM_FRAMEWORK_PARAMS") or "{}"))
    except (LaunchError, ValueError, TypeError):
        pass  # SM_FRAMEWORK_PARAMS is the toolkit's own; `plan` says what is wrong with the files
    return sorted(
        name for name, value in params.items() if name.endswith("_enabled") and value is True
    )


def plan(job: PlannedJob, refused: str) -> Iterator[ReportLine]:
    """Say what would run, or why it would not start; `refused` is why torchrun's parser does."""
    if job.error:
        yield problem("job", job.error.rstrip("."), "")  # the launcher's message says what to do
    elif refused:
        to_do = f"correct {flag('torchrun_args')}"
        yield problem("job", f"torchrun would fail: {refused}", to_do)
    else:
        lines = Job(job.cluster, job.options, job.plan).summary() if job.plan else ()
        summary = " ".join(lines).rstrip(".")
        alone = "" if job.names_script else ("no script was given, so only this host was checked; ")
        yield ok("job", alone + summary)
