"""The torchrun command of this host, and the environment it adds. Nothing is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher import __version__
from launcher.errors import LaunchError
from launcher.host.archive import ARCHIVE, PACKAGE
from launcher.job import torchrun
from launcher.job.job import Cluster, Job, LaunchPlan, endpoint_at, host_and_port
from launcher.job.options import ATTEMPT, MASTER_ADDR, Options, names
from launcher.job.resources import Resources
from launcher.job.tuning import tuned
from launcher.text.words import flag

AGENT = os.path.join(PACKAGE, "run", "agent.py")
RANK = os.path.join(PACKAGE, "run", "rank.py")
NURSERY = os.path.join(PACKAGE, "run", "nursery.py")


class _Extra(NamedTuple):
    """What few jobs ask for: see smddp.py and neuron.py."""

    runner: str  # as in LaunchPlan
    environment: Mapping[str, str]
    remarks: tuple[str, ...]
    fingerprint: Mapping[str, Any]


def command(plan: LaunchPlan, folder: str = "") -> str:
    """Return the command to be pasted into a shell: where it runs, and what it adds."""
    import shlex  # only people need it

    words = [shlex.quote(f"{name}={value}") for name, value in plan.environment.items()]
    argv = _plain(plan.argv) if ARCHIVE else plan.argv
    begin = f"cd {shlex.quote(folder)} && env" if folder else "env"
    return " \\\n    ".join([begin, *words, shlex.join(argv)])


def _plain(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return torchrun's own command for one that executes files in an archive, which nobody can."""
    agent, rank = argv.index(AGENT), argv.index(RANK)
    flags = argv[agent + 1 : rank - 1]
    if argv[rank + 1] == "module":
        flags += ("--module",)
    return (*argv[:agent], "-m", "torch.distributed.run", *flags, "--", *argv[rank + 2 :])


def make_plan(
    options: Options,
    cluster: Cluster,
    resources: Resources,
    environ: Mapping[str, str],
    *,
    added: Mapping[str, str],
) -> LaunchPlan:
    """Turn what is known into one torchrun command.

    `added` are variables that the ranks need besides those that are made here: the `SM_*` of an
    image without the toolkit, and its PYTHONPATH. Raises LaunchError for settings that contradict
    each other, and for text that cannot be passed to a process.
    """
    torchrun.refuse_conflicts(options, cluster, environ)
    nproc = torchrun.nproc_per_node(options, cluster, environ)
    flags, replaced = torchrun.flags(options, cluster, resources, environ)
    extra = _extra(options, {**environ, **added})
    script = ("script", options.train_script)
    if options.train_module:
        script = ("module", options.train_module)
    # torchrun substitutes ${local_rank} and the like in arguments; "$$" stands for "$".
    words = (word.replace("$", "$$") for word in (*script, *options.script_args))
    for_speed, reasons = tuned(nproc, cluster, resources, environ)
    nursery, why_cold = _nursery(options, resources, environ, extra.runner)
    others = [*replaced, torchrun.of_slices(nproc, options, cluster), *extra.remarks, why_cold]
    plan = LaunchPlan(
        # Without "--" torchrun takes a script's --log or --node for its own --log-dir or --nnodes.
        argv=(*filter(None, [extra.runner]), resources.python, AGENT, *flags, "--", RANK, *words),
        environment={**added, **for_speed, **extra.environment},
        nproc_per_node=str(nproc),
        remarks=tuple(filter(None, [*reasons, " ".join(filter(None, others))])),
        fingerprint={
            "version of the launcher": __version__,
            "version of torch": ".".join(map(str, resources.torch_version)),
            "rendezvous endpoint": endpoint_at(cluster, options, cluster.hosts[0]),
            "script": " ".join(script),
            "script's arguments": list(options.script_args),
            **extra.fingerprint,
        },
        runner=extra.runner,
        program=_program(options, resources, environ),
        nursery=nursery,
    )
    _check_text(plan)
    return plan


def _program(options: Options, resources: Resources, environ: Mapping[str, str]) -> str:
    """Return what runs; which torch another Python of the ranks' has is not known."""
    python = ".".join(map(str, sys.version_info[:3]))
    what = options.train_script or f"the module {options.train_module}"
    line = f"sm-launch {__version__} with torch {resources.torch} and Python {python} runs {what}"
    ranks = environ.get("PYTHON_EXEC") or resources.python
    other = "" if ranks == resources.python else f", and its ranks with PYTHON_EXEC={ranks}"
    return f"{line}{other}."


def _extra(options: Options, environ: Mapping[str, str]) -> _Extra:
    runner, library = "", "none"
    environment: dict[str, str] = {}
    remarks = []
    # Modules that most jobs need not import.
    if "RUN_NEURON_PARALLEL_COMPILE" in environ:
        from launcher.job import neuron

        runner = neuron.runner(environ)
        if runner:
            remarks.append(
                f"{runner} runs torchrun: the job compiles its graphs and does not train."
            )
    if options.smddp_compat:
        from launcher.job import smddp

        library, environment, remark = smddp.chosen(environ)
        remarks.append(remark)
    fingerprint = {
        "program that runs torchrun": runner or "none",
        f"smdistributed.dataparallel ({flag('smddp_compat')})": library,
    }
    return _Extra(runner, environment, tuple(remarks), fingerprint)


def _nursery(
    options: Options, resources: Resources, environ: Mapping[str, str], runner: str
) -> tuple[tuple[str, ...], str]:
    """Return the command of what forks torchrun and ranks, or () and why a warm start is cold."""
    if options.start != "warm":
        return (), ""
    python = environ.get("PYTHON_EXEC", resources.python)
    other = runner or (python if python != resources.python else "")
    if other:
        return (), f"{flag('start')} warm falls back to cold: {other} runs torchrun or the ranks."
    script = os.path.join(options.folder, options.train_script)
    folder = os.path.dirname(os.path.realpath(script)) if options.train_script else ""
    return (resources.python, "-u", NURSERY, folder, *options.preload), ""


def at_address(
    plan: LaunchPlan, job: Job, address: str, interface: str, *, has_name: bool
) -> LaunchPlan:
    """Return the plan of a host that the others reach at an address.

    gloo has to use the interface with that address: by itself it takes the one that the host's own
    name resolves to, which may be the loopback. `has_name` is false if a host's own name does
    not resolve: then its torchrun keeps the store at the address, and all ranks get the address as
    MASTER_ADDR.
    """
    cluster = job.cluster
    added: dict[str, str] = {}
    if interface:
        added["GLOO_SOCKET_IFNAME"] = interface
    argv = plan.argv
    if cluster.node_rank == 0 and not has_name:
        added[MASTER_ADDR] = address
        endpoint = host_and_port(address, job.options.rdzv_port)
        option = "--rdzv-endpoint="
        argv = tuple(option + endpoint if word == option + job.endpoint else word for word in argv)
    if not added:
        return plan
    reasons = ", ".join(f"{name}={value}" for name, value in added.items())
    remark = f"{cluster.current_host} can be reached from the other hosts at {address}: {reasons}."
    return plan._replace(
        argv=argv, environment={**plan.environment, **added}, remarks=(*plan.remarks, remark)
    )


def for_attempt(
    plan: LaunchPlan, environ: Mapping[str, str], attempt: int
) -> tuple[LaunchPlan, dict[str, str]]:
    """Return the plan and the environment of an attempt: from the second on JOB-2, JOB-3, ...

    Each has a rendezvous of its own, in which nothing of the one before is left. (No slash:
    torchrun makes a folder of it.)
    """
    environment = {**environ, ATTEMPT: str(attempt)}
    if attempt == 1:
        return plan, environment
    suffix, argv = f"-{attempt}", list(plan.argv)
    for index in range(argv.index("--")):
        if names(argv[index], "--rdzv-id"):
            argv[index if "=" in argv[index] else index + 1] += suffix
    if environment.get("PET_RDZV_ID"):
        environment["PET_RDZV_ID"] += suffix
    return plan._replace(argv=tuple(argv)), environment


def _check_text(plan: LaunchPlan) -> None:
    """Refuse text that execve cannot pass on; only hyperparameters.json can hold any."""
    for text in (*plan.argv, *plan.environment.values()):
        _encode(text)
    for name in plan.environment:
        if "=" in name:
            raise LaunchError(
                f"{name!r} cannot be the name of an environment variable; "
                "rename the hyperparameter."
            )
        _encode(name)


def _encode(text: str) -> None:
    try:
        if b"\0" not in os.fsencode(text):
            return
    except UnicodeEncodeError:
        pass
    raise LaunchError(
        f"{text[:200]!r} cannot be passed to a process; expected text without NUL characters "
        "or lone surrogates."
    )
