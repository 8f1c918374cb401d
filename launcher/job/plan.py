"""The torchrun command of this host, and the environment it adds. Nothing is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher import PACKAGE, __version__
from launcher.errors import LaunchError
from launcher.job import torchrun
from launcher.job.job import Cluster, Job, LaunchPlan, endpoint_at, host_and_port
from launcher.job.options import Options
from launcher.job.resources import Resources
from launcher.job.tuning import tuned
from launcher.text.words import flag

STUB = os.path.join(PACKAGE, "run", "stub.py")


class _Extra(NamedTuple):
    """What few jobs ask for: see smddp.py and neuron.py."""

    runner: str  # as in LaunchPlan
    environment: Mapping[str, str]
    remarks: tuple[str, ...]
    fingerprint: Mapping[str, Any]


def command(plan: LaunchPlan, folder: str = "") -> str:
    """Return plain torchrun's command for a shell: where it runs, and the variables it adds."""
    import shlex  # only people need it

    words = [shlex.quote(f"{name}={value}") for name, value in plan.environment.items()]
    begin = f"cd {shlex.quote(folder)} && env" if folder else "env"
    return " \\\n    ".join([begin, *words, shlex.join(_plain(plan.argv))])


def _plain(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command without keepers, which need a launcher."""
    begin = argv.index("--no-python")
    kind, *words = argv[begin + len(_keeper("")) :]
    return (*argv[:begin], *(["--module"] if kind == "module" else []), "--", *words)


def _keeper(python: str) -> tuple[str, ...]:
    """Return the words by which torchrun starts a keeper, which starts and ends its rank."""
    # Without "--" torchrun takes a script's --log or --node for its own --log-dir or --nnodes.
    return ("--no-python", "--", python, "-I", "-S", STUB.replace("$", "$$"))


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
    # torchrun replaces ${local_rank} and the like in arguments; "$$" stands for "$".
    words = (word.replace("$", "$$") for word in (*_target(options), *options.script_args))
    for_speed, reasons = tuned(nproc, cluster, resources, environ)
    why_cold = _why_cold(options, resources, environ, extra.runner)
    warm = options.start == "warm" and not why_cold
    others = [*replaced, torchrun.of_slices(nproc, options, cluster), *extra.remarks, why_cold]
    plan = LaunchPlan(
        argv=(
            *filter(None, [extra.runner]),
            *(resources.python, "-m", "torch.distributed.run", *flags),
            *(*_keeper(resources.python), *words),
        ),
        environment={**added, **for_speed, **extra.environment},
        nproc_per_node=str(nproc),
        remarks=tuple(filter(None, [*reasons, " ".join(filter(None, others))])),
        fingerprint={**_fingerprint(options, cluster, resources), **extra.fingerprint},
        runner=extra.runner,
        program=_program(options, resources, environ),
        warm=warm,
        preload=options.preload if warm else (),
        tees=torchrun.has_files_of_torchruns(options, environ),
        master_addr=_master_addr(cluster, resources),
    )
    _check_text(plan)
    return plan


def _target(options: Options) -> tuple[str, str]:
    """Return what runs, as the keeper takes it: KIND and TARGET."""
    if options.train_module:
        return "module", options.train_module
    return "script", options.train_script


def _fingerprint(options: Options, cluster: Cluster, resources: Resources) -> dict[str, Any]:
    return {
        "version of the launcher": __version__,
        "version of torch": ".".join(map(str, resources.torch_version)),
        "rendezvous endpoint": endpoint_at(cluster, options, cluster.hosts[0]),
        "script": " ".join(_target(options)),
        "script's arguments": list(options.script_args),
    }


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


def _why_cold(
    options: Options, resources: Resources, environ: Mapping[str, str], runner: str
) -> str:
    """Return the line that says why a warm start falls back to cold, "" if it does not."""
    if options.start != "warm":
        return ""
    python = environ.get("PYTHON_EXEC", resources.python)
    other = runner or (python if python != resources.python else "")
    return (
        f"{flag('start')} warm falls back to cold: {other} runs torchrun or the ranks."
        if other
        else ""
    )


def _master_addr(cluster: Cluster, resources: Resources) -> str:
    """Return the MASTER_ADDR that ranks get in place of torchrun's, "" if torchrun's is right.

    Torch 2.4 makes it of what the first host calls itself (getfqdn), which need not resolve.
    """
    if resources.torch_version >= (2, 5):
        return ""
    return cluster.address(cluster.hosts[0]) if cluster.nnodes > 1 else "localhost"


def at_address(
    plan: LaunchPlan, job: Job, address: str, interface: str, *, has_name: bool
) -> LaunchPlan:
    """Return the plan of a host that the others reach at an address.

    gloo has to use the interface with that address: by itself it takes the one that the host's own
    name resolves to, which may be the loopback. `has_name` is false if a host's own name does
    not resolve: then torchrun on the first host uses the address for its store and for itself.
    (It sorts hosts by what they call themselves: an address comes before all names, and so the
    first host stays the first.)
    """
    cluster = job.cluster
    added = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    replaced: dict[str, str] = {}  # words of torchrun's command
    if cluster.node_rank == 0 and not has_name:
        endpoint = host_and_port(address, job.options.rdzv_port)
        replaced[f"--rdzv-endpoint={job.endpoint}"] = f"--rdzv-endpoint={endpoint}"
        own = cluster.address(cluster.current_host)
        replaced[f"--local-addr={own}"] = f"--local-addr={address}"
        plan = plan._replace(master_addr=plan.master_addr and address)
    reasons = [f"{name}={value}" for name, value in added.items()]
    reasons += [replaced[word] for word in plan.argv if word in replaced]
    if not reasons:
        return plan
    remark = (
        f"{cluster.current_host} can be reached from the other hosts at {address}: "
        f"{', '.join(reasons)}."
    )
    return plan._replace(
        argv=tuple(replaced.get(word, word) for word in plan.argv),
        environment={**plan.environment, **added},
        remarks=(*plan.remarks, remark),
    )


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
