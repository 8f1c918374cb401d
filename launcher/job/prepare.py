"""From arguments and environment to this host's plan, and to warnings; nothing is started."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Mapping, Sequence

from launcher.errors import LaunchError
from launcher.host.journal import host_folder
from launcher.host.network import listen_on_all
from launcher.job import arguments, target, toolkit
from launcher.job.cluster import read_cluster
from launcher.job.job import Job, LaunchPlan
from launcher.job.options import INTERNAL, Options
from launcher.job.plan import SAGEMAKER_KILLS_AFTER, make_plan
from launcher.job.resources import interface_of, read_resources
from launcher.text.log import log
from launcher.text.words import flag

_FEWEST_FILES = 26  # that torchrun needs; the first host also one for each other host


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> Job | None:
    """Return the job with this host's plan; None if this host takes no part in it.

    After a stop do not wait for drivers that block: nothing will be started.
    Raises LaunchError if it is not even clear which hosts the job has.
    """
    _refuse_surroundings(environ)
    given = toolkit.read_input(argv, environ)
    try:
        options = arguments.parse(given.words, environ)
        described = {**given.variables, **environ}
        cluster = read_cluster(described, options.instance_groups)
    except LaunchError as error:
        error.args = (" ".join(filter(None, [str(error), given.hint])),)
        raise
    if cluster.current_host not in cluster.hosts:
        groups = ", ".join(options.instance_groups)
        log(f"{cluster.current_host} is in none of the instance groups {groups}; nothing to do.")
        return None
    try:
        folders = (toolkit.code_dir(environ), options.script_dir)
        options = target.located(options, folders, given.home)
        if options.log_dir and not options.dry_run:
            _require_folder(host_folder(options.log_dir, cluster.current_host), options.log_dir)
        job = Job(cluster, options)
        _require_files(job)
        added = {**given.variables, **_surroundings(options, given.home, environ)}
        plan = make_plan(job, read_resources(), environ, added=added)
        is_ours = any(word.startswith("--rdzv-endpoint=") for word in plan.argv)  # not PET_...
        if job.has_peers and cluster.node_rank == 0 and is_ours:
            _require_port(job)
    except Exception as error:  # the other hosts are told, too
        return Job(cluster, options, error=error)
    # Logged only now, so that an error is the only line.
    for line in (*given.lines, *_without_effect(options, environ)):
        log(line)
    return job._replace(plan=plan)


def reached_at(job: Job, address: str, environ: Mapping[str, str], *, has_name: bool) -> LaunchPlan:
    """Return the plan of a host that the others reach at this address.

    gloo must use the interface with that address, unless the user has chosen another: by default it
    uses the interface that the host's own name resolves to, which may be the loopback. `has_name`
    is false if a host's own name does not resolve: then torchrun on the first host uses the address
    for its store and for itself. (torchrun sorts hosts by their own names: an address sorts before
    all names, so the first host stays the first.)
    """
    plan, name = job.plan, "GLOO_SOCKET_IFNAME"
    interface = "" if name in {**environ, **plan.environment} else interface_of(address)
    if job.options.verbose:
        seen = f": {name}={interface}" if interface else ""
        log(f"{job.current_host} can be reached from the other hosts at {address}{seen}.")
    if interface:
        plan = plan._replace(environment={**plan.environment, name: interface})
    if has_name or job.cluster.node_rank:
        return plan
    words = {
        f"--rdzv-endpoint={job.endpoint}": f"--rdzv-endpoint={job.endpoint_at(address)}",
        f"--local-addr={job.cluster.address(job.current_host)}": f"--local-addr={address}",
    }
    argv = tuple(words.get(word, word) for word in plan.argv)
    return plan._replace(argv=argv, master_addr=plan.master_addr and address)


def _surroundings(options: Options, home: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which ranks find and import the same files as under `train`.

    Relative paths become absolute if the ranks have another current folder.
    """
    path = environ.get("PYTHONPATH", "")
    folders = path.split(os.pathsep) if path else []
    made = {}
    if options.folder:
        folders = list(map(os.path.abspath, folders))
        for name in ("TMPDIR", "PET_LOG_DIR"):
            if environ.get(name):
                made[name] = os.path.abspath(environ[name])
    if home and os.path.isdir(home):
        folders = [home, *(folder for folder in folders if folder != home)]
    made["PYTHONPATH"] = os.pathsep.join(folders)
    return {name: value for name, value in made.items() if value != environ.get(name, "")}


def _require_folder(path: str, log_dir: str) -> None:
    """Create DIR/HOST for the ranks' logs."""
    try:
        os.makedirs(path, exist_ok=True)
    except ValueError as error:
        raise LaunchError(f"--launcher-log-dir: {log_dir} is no path ({error}).") from None
    except OSError as error:
        folder = path if os.path.isdir(log_dir) else log_dir
        raise LaunchError(
            f"--launcher-log-dir: cannot create the folder {folder} ({error.strerror})."
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise LaunchError(f"--launcher-log-dir: this user may not write to {path}.")


def _require_files(job: Job) -> None:
    """Check that there are enough descriptors: with 22 torchrun waits for ever (torch 2.13)."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the soft limit is raised to it
    needs = _FEWEST_FILES + len(job.members) * job.coordinates
    if 0 <= files < needs:  # it is -1 without a limit
        raise LaunchError(
            f"this process may have {files} files open (ulimit -n), but needs {needs}; raise that "
            "limit."
        )


def _require_port(job: Job) -> None:
    """Check on the first host that torchrun's store can listen; torchrun takes seconds to fail."""
    try:
        listen_on_all(job.options.rdzv_port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"{job.taken_port()}.") from None


def _refuse_surroundings(environ: Mapping[str, str]) -> None:
    """Refuse to start below another launcher, or in a removed folder."""
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


def _without_effect(options: Options, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each setting that surely has no effect, or less than it says."""
    others = environ.keys() - {*arguments.TWINS, *INTERNAL}
    for variable in sorted(name for name in others if name.startswith("LAUNCHER_")):
        yield f"warning: {variable} is not a launcher option; see --launcher-help."
    yield from _meant_for_the_launcher(options)
    unused = {
        "preload": options.start != "warm"
        and f"{flag('start')} is cold, and each rank imports what it needs",
        "restart_timeout": not options.max_restarts and f"{flag('max_restarts')} is 0",
        "hang_notify": not options.watch and f"{flag('watch')} 0 turns the progress checks off",
    }
    for field, why in unused.items():
        if why and field in options.given:
            yield f"warning: {flag(field)} has no effect: {why}."
    if options.script_dir and not os.path.isdir(options.script_dir):
        yield f"warning: {flag('script_dir')}: there is no folder {options.script_dir}."
    # SageMaker sets it, and so does `sm-launch local`.
    if options.grace > SAGEMAKER_KILLS_AFTER and environ.get("TRAINING_JOB_ARN"):
        yield (
            f"warning: {flag('grace')} is {options.grace} s, but SageMaker kills everything "
            f"{SAGEMAKER_KILLS_AFTER} s after a stop; use less."
        )


def _meant_for_the_launcher(options: Options) -> Iterator[str]:
    """Yield a line for each script argument with the name of an option of ours or of torchrun."""
    for name in (word.partition("=")[0] for word in options.script_args):
        spelled = name.lower().replace("_", "-")
        ours = spelled if spelled in (*arguments.TARGETS, *arguments.FIELDS) else ""
        if spelled == "--nproc-per-node" and "nproc_per_node" not in options.given:
            ours = flag("nproc_per_node")
        if ours:
            yield f"warning: {name} is passed to the script; the launcher's own option is {ours}."
