"""From arguments and environment to what this host is to run, before anything is started."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import Mapping, Sequence

from launcher.errors import LaunchError
from launcher.host.journal import host_folder
from launcher.host.signals import Signals
from launcher.job import arguments, target, toolkit
from launcher.job.cluster import read_cluster
from launcher.job.job import Cluster, Job, LaunchPlan
from launcher.job.no_effect import without_effect
from launcher.job.options import Options
from launcher.job.plan import at_address, make_plan, with_own_variables
from launcher.job.resources import interface_of, read_resources
from launcher.text.log import log
from launcher.text.words import port_is_taken


def prepare(
    argv: Sequence[str], environ: Mapping[str, str], signals: Signals | None = None
) -> Job | None:
    """Return the job, what this host is to start included; None if it takes no part in it.

    If a stop is among the signals it is not waited for drivers that block: nothing will be started.
    Raises LaunchError if it is not even clear which hosts the job has.
    """
    _refuse_surroundings(environ)
    config = None if "SM_HOSTS" in environ else toolkit.read_config(environ)
    argv, said = _arguments(config, argv, environ)
    made: dict[str, str] = {}
    left_out: list[str] = []
    if config:
        of_files, made, left_out = toolkit.of_files(config, environ, signals)
        argv = [*of_files, *argv]
    chosen = _chosen(argv, environ, said)
    cluster = _cluster(config, {**made, **environ}, chosen, signals)
    if not cluster.takes_part:
        groups = ", ".join(chosen.instance_groups)
        log(f"{cluster.current_host} is in none of the instance groups {groups}; nothing to do.")
        return None
    code = toolkit.code_dir(environ)
    # The code folder if there is no `train` to make the surroundings of it.
    home = os.path.normpath(code) if config and os.path.isabs(code) else ""
    try:
        chosen = target.located(chosen, (code, chosen.script_dir), home)
        added = {name: value for name, value in made.items() if name not in environ}
        added.update(_surroundings(chosen, home, environ))
        job = Job(cluster, chosen, _planned(chosen, cluster, environ, added))
        if job.has_peers and cluster.node_rank == 0:
            _require_port(job.endpoint)
    except Exception as error:  # which the other hosts are told, too
        return Job(cluster, chosen, error)
    # Logged only now, so that an error is the only line.
    for line in (*said, *without_effect(chosen, environ), *left_out):
        log(line)
    if config is None and "SM_HOSTS" not in environ:
        log("found neither SM_HOSTS nor SageMaker's config files: running on this host alone.")
    return job


def reached_at(
    plan: LaunchPlan, job: Job, address: str, own_name_resolves: bool, environ: Mapping[str, str]
) -> LaunchPlan:
    """Have torchrun and gloo use the address that the other hosts have found this one at."""
    interface = "" if "GLOO_SOCKET_IFNAME" in environ else interface_of(address)
    made = at_address(plan, job, address, interface, has_name=own_name_resolves)
    for line in made.remarks[len(plan.remarks) :]:
        log(line)
    return made


def _arguments(
    config: toolkit.TrainingConfig | None, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the arguments that count, hyperparameters of files apart, and what the log says of it.

    SageMaker starts an image with the word `train`; the script is a hyperparameter.
    """
    words, said = arguments.without_start_word(argv), []
    if words and len(words) < len(argv):
        said.append(
            f"the first argument, {argv[0]}, is how SageMaker starts an image, so it is not "
            "passed to the script (to pass it, put it after another argument)."
        )
    if config is None:
        if not words and (words := toolkit.as_arguments(environ)):
            said.append("started without arguments: using the hyperparameters (SM_HPS).")
        said += toolkit.not_passed(words, environ)
    return words, said


def _chosen(argv: Sequence[str], environ: Mapping[str, str], said: Sequence[str]) -> Options:
    """Return the options as they count.

    A script that SM_HPS names, and no argument, is said with the error.
    """
    try:
        typed = arguments.parse(argv, environ)
    except LaunchError as error:
        near = [line for line in said if "train-script" in line or "train-module" in line]
        raise type(error)(" ".join([str(error), *near])) from None
    return with_own_variables(typed, environ)


def _cluster(
    config: toolkit.TrainingConfig | None,
    seen: dict[str, str],
    chosen: Options,
    signals: Signals | None,
) -> Cluster:
    if chosen.instance_groups and "SM_INSTANCE_GROUPS_DICT" not in seen:
        files = toolkit.read_config(seen)  # SDK v3 makes SM_HOSTS, but not these
        groups = toolkit.instance_groups(files.resource_config) if files else {}
        seen["SM_INSTANCE_GROUPS_DICT"] = json.dumps(groups)
    try:
        return read_cluster(seen, chosen.instance_groups, signals)
    except LaunchError as error:
        if config is None:
            raise
        raise LaunchError(f"{error} (The SM_ variables were made from {config.folder}.)") from None


def _surroundings(chosen: Options, home: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks need to find, and to import, what they would under `train`.

    Paths that are relative to the current folder become absolute, where the ranks have another one.
    """
    path = environ.get("PYTHONPATH", "")
    folders = path.split(os.pathsep) if path else []
    made = {}
    if chosen.folder:
        folders = list(map(os.path.abspath, folders))
        for name in ("TMPDIR", "PET_LOG_DIR"):
            if environ.get(name):
                made[name] = os.path.abspath(environ[name])
    if home and _holds_something(home):
        folders = [home, *(folder for folder in folders if folder != home)]
    made["PYTHONPATH"] = os.pathsep.join(folders)
    return {name: value for name, value in made.items() if value != environ.get(name, "")}


def _holds_something(folder: str) -> bool:
    try:
        return bool(os.listdir(folder))
    except OSError:
        return False


def _planned(
    chosen: Options, cluster: Cluster, environ: Mapping[str, str], added: Mapping[str, str]
) -> LaunchPlan:
    if chosen.hang_timeout < math.inf and not chosen.watch:
        raise LaunchError(
            "--launcher-hang-timeout needs the progress checks that --launcher-watch 0 turns "
            "off; remove one of the two."
        )
    if chosen.log_dir and not chosen.dry_run:
        _require_folder(host_folder(chosen.log_dir, cluster.current_host), chosen.log_dir)
    if chosen.log_dir and chosen.folder:
        chosen = chosen._replace(log_dir=os.path.abspath(chosen.log_dir))
    return make_plan(chosen, cluster, read_resources(), environ, added=added)


def _require_folder(path: str, log_dir: str) -> None:
    """Make DIR/HOST, where ranks' logs are to be made."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        folder = path if os.path.isdir(log_dir) else log_dir
        raise LaunchError(
            f"--launcher-log-dir: cannot create the folder {folder} ({error.strerror})."
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise LaunchError(f"--launcher-log-dir: this user may not write to {path}.")


def _require_port(endpoint: str) -> None:
    """See on the first host that torchrun's store can listen; it would take seconds to fail."""
    port = int(endpoint.rpartition(":")[2])
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            socket.create_server(("", port), family=family).close()
        except OSError as error:  # others: IPv6 may be switched off
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(f"{port_is_taken(endpoint)}.") from None


def _refuse_surroundings(environ: Mapping[str, str]) -> None:
    """Refuse to start below another launcher, or in a folder that is no more."""
    for variable in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK"):
        if environ.get(variable):
            raise LaunchError(
                f"{variable} is {environ[variable]!r}: another launcher started this one, once "
                "per rank; remove distribution= from the estimator."
            )
    try:
        os.getcwd()
    except OSError:
        raise LaunchError(
            "the current folder has been removed; change to one that exists."
        ) from None
