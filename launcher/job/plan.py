"""The torchrun command of this host, and the environment it adds. Nothing is started here.

The comments say what goes wrong without an option, as seen in torchrun's source and in trials.
`torchrun` and `torch.distributed.run` are the same program. What its PET_ variables say counts in
place of the launcher's own choice, but not of an option that the user gives.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from launcher import PACKAGE, __version__
from launcher.errors import LaunchError
from launcher.job.job import Cluster, Job, LaunchPlan, endpoint_at, host_and_port
from launcher.job.options import COUNTED, RANKS, Options
from launcher.job.resources import Resources
from launcher.job.tuning import tuned
from launcher.text.words import flag, short

STUB = os.path.join(PACKAGE, "run", "stub.py")
SAGEMAKER_KILLS_AFTER = 120  # seconds, from SIGTERM to SIGKILL


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
    users = _settings(options, resources, environ)
    _refuse_conflicts(options, cluster, users)
    nproc = _nproc_per_node(options, cluster, environ)
    _refuse_ranks(options, cluster, nproc)
    tees = any(users.get(name, "0") not in ("", "0") for name in ("tee", "redirects"))
    flags, replaced = _flags(options, cluster, resources, environ, tees=tees)
    runner, compiles = _compiler({**environ, **added})
    library, for_library, whose = _smddp(options, {**environ, **added})
    for_speed, reasons = tuned(nproc, cluster, resources, environ)
    ranks_python = environ.get("PYTHON_EXEC") or resources.python
    other = runner or (ranks_python if ranks_python != resources.python else "")
    warm = options.start == "warm" and not other
    others = [*replaced, _of_slices(nproc, options, cluster), compiles, whose]
    if options.start == "warm" and other:
        others.append(
            f"{flag('start')} warm falls back to cold: {other} runs torchrun or the ranks."
        )
    # torchrun replaces ${local_rank} and the like in arguments; "$$" stands for "$".
    words = [word.replace("$", "$$") for word in (*_target(options), *options.script_args)]
    torchrun = (resources.python, "-m", "torch.distributed.run", *flags)
    plan = LaunchPlan(
        argv=(*filter(None, [runner]), *torchrun, *_keeper(resources.python), *words),
        environment={**added, **for_speed, **for_library},
        nproc_per_node=str(nproc),
        remarks=tuple(filter(None, [" ".join(filter(None, others))])),
        reasons=reasons,
        fingerprint=_fingerprint(options, cluster, resources, runner, library),
        runner=runner,
        program=_program(options, resources, ranks_python),
        warm=warm,
        preload=options.preload if warm else (),
        tees=tees,
        master_addr=_master_addr(cluster, resources),
    )
    _check_text(plan)
    return plan


def _target(options: Options) -> tuple[str, str]:
    """Return what runs, as the keeper takes it: KIND and TARGET."""
    if options.train_module:
        return "module", options.train_module
    return "script", options.train_script


def _fingerprint(
    options: Options, cluster: Cluster, resources: Resources, runner: str, library: str
) -> dict[str, Any]:
    return {
        "version of the launcher": __version__,
        "version of torch": ".".join(map(str, resources.torch_version)),
        "rendezvous endpoint": endpoint_at(cluster, options, cluster.hosts[0]),
        "script": " ".join(_target(options)),
        "script's arguments": list(options.script_args),
        "program that runs torchrun": runner or "none",
        f"smdistributed.dataparallel ({flag('smddp_compat')})": library,
    }


def _program(options: Options, resources: Resources, ranks_python: str) -> str:
    """Return what runs with which versions; of another Python of the ranks' they are not known."""
    what = options.train_script or f"the module {options.train_module}"
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if ranks_python != resources.python:
        python += f" (ranks: PYTHON_EXEC={ranks_python})"
    return f"{what} with torch {resources.torch}, {python} and sm-launch {__version__}"


def _compiler(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the program that is to run torchrun, if one is, and what to say of it."""
    if "RUN_NEURON_PARALLEL_COMPILE" not in environ:
        return "", ""
    from launcher.job import neuron  # which most jobs need not import

    runner = neuron.runner(environ)
    remark = f"{runner} runs torchrun: the job compiles its graphs and does not train."
    return runner, remark if runner else ""


def _smddp(options: Options, environ: Mapping[str, str]) -> tuple[str, Mapping[str, str], str]:
    """Return whose smdistributed.dataparallel ranks import, its variables, and what to say."""
    if not options.smddp_compat:
        return "none", {}, ""
    from launcher.job import smddp  # which most jobs need not import

    return smddp.chosen(environ)


def _master_addr(cluster: Cluster, resources: Resources) -> str:
    """Return the MASTER_ADDR that ranks get in place of torchrun's, "" if torchrun's is right.

    Torch 2.4 makes it of what the first host calls itself (getfqdn), which need not resolve.
    """
    if resources.torch_version >= (2, 5):
        return ""
    return cluster.address(cluster.hosts[0]) if cluster.nnodes > 1 else "localhost"


def _settings(options: Options, resources: Resources, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the user has torchrun do, by its options' fields. Raises LaunchError."""
    users = {
        name[len("PET_") :].lower(): text
        for name, text in environ.items()
        if name.startswith("PET_")
    }
    if options.torchrun_args:
        from launcher.job import torchrun_args  # 5 ms of CPU that most jobs need not spend

        users.update(torchrun_args.settings_of(options.torchrun_args, resources.torchrun))
    return users


def _refuse_conflicts(options: Options, cluster: Cluster, users: Mapping[str, str]) -> None:
    """Raise LaunchError for settings of torchrun's, or ports, that cannot work with this job."""
    # Modes that would not run the stub, or would make a job of each host.
    for name in ("module", "no_python", "run_path"):
        if users.get(name, "0") != "0":
            raise LaunchError(
                f"PET_{name.upper()} is {users[name]!r}; expected it to be unset: use "
                "--train-script PATH or --train-module NAME."
            )
    if cluster.nnodes > 1 and users.get("standalone", "0") != "0":
        raise LaunchError(
            "torchrun's standalone mode is set on a cluster of several hosts, where each "
            "would train by itself; remove --standalone, and unset PET_STANDALONE."
        )
    # A rendezvous that the hosts cannot meet by: no etcd is here, nor a node rank.
    backend = users.get("rdzv_backend") or "c10d"
    if backend != "c10d" and (backend, cluster.nnodes) != ("static", 1):
        raise LaunchError(
            f"PET_RDZV_BACKEND is {short(backend)}; expected c10d, or the variable to be unset."
        )
    if options.hang_timeout < math.inf and not options.watch:
        raise LaunchError(
            f"{flag('hang_timeout')} needs the progress checks that {flag('watch')} 0 turns off; "
            "remove one of the two."
        )
    if options.rdzv_port == options.peer_port:
        raise LaunchError(
            f"{flag('rdzv_port')} and {flag('peer_port')} are both {options.rdzv_port}; "
            "expected two different ports."
        )
    # Of another number of hosts than the job's, torchrun would wait for some, or leave some out.
    nnodes, count = users.get("nnodes", ""), f"{cluster.nnodes}"
    if nnodes not in ("", count, f"{count}:{count}") and "instance_groups" not in options.given:
        raise LaunchError(
            f"PET_NNODES is {short(nnodes)}; expected it to be unset, or {count}: SM_HOSTS and "
            f"{flag('instance_groups')} determine the job's hosts."
        )


def _refuse_ranks(options: Options, cluster: Cluster, nproc: int | str) -> None:
    """Raise LaunchError for ranks that the job does not have, where all hosts have as many."""
    is_alike = cluster.nnodes == 1 or "nproc_per_node" in options.given
    last = max((ranks[-1] for ranks in options.log_ranks), default=-1)
    if isinstance(nproc, int) and is_alike and last >= nproc * cluster.nnodes:
        ranks = f"ranks from 0 to {nproc * cluster.nnodes - 1}"
        raise LaunchError(f"{flag('log_ranks')} names rank {last}; expected {ranks}.")


def _flags(
    options: Options,
    cluster: Cluster,
    resources: Resources,
    environ: Mapping[str, str],
    *,
    tees: bool,
) -> tuple[list[str], list[str]]:
    """Return torchrun's options, and a remark for each that the user's PET_ variable replaces."""
    first, own = map(cluster.address, (cluster.hosts[0], cluster.current_host))
    values = [  # each with the field of ours that sets it, or ""
        ("nproc-per-node", f"{_own_nproc(options, cluster)}", "nproc_per_node"),
        ("rdzv-backend", "c10d", ""),
        ("rdzv-endpoint", endpoint_at(cluster, options, first), "rdzv_port"),
        ("rdzv-id", cluster.job_name, ""),
        # Also what the ranks get as MASTER_ADDR, in place of a name that may not resolve.
        ("local-addr", own if cluster.nnodes > 1 else "localhost", ""),
    ]
    if options.log_dir and tees:  # torchrun itself writes what ranks print
        values.append(("log-dir", os.path.abspath(options.log_dir), "log_dir"))
    if resources.torch_version >= (2, 12):
        # How long the ranks' keepers have if torchrun ends before the job.
        values.append(("shutdown-timeout", f"{options.grace}", "grace"))
    chosen = [f"--nnodes={cluster.nnodes}", f"--rdzv-conf={_rdzv_conf(options, cluster, environ)}"]
    chosen.append("--max-restarts=0")  # the launchers restart ranks
    restarts = environ.get("PET_MAX_RESTARTS") or "0"
    replaced = []
    if restarts != "0" and "max_restarts" not in options.given:
        replaced.append(f"PET_MAX_RESTARTS={restarts} is used instead of 0.")
    for name, value, field in values:
        # An option on the command line would win over the user's PET_ variable for it.
        variable = "PET_" + name.upper().replace("-", "_")
        users = environ.get(variable)
        if users and field not in options.given:
            if users != value:
                replaced.append(f"{variable}={users} is used instead of {value}.")
        else:
            chosen.append(f"--{name}={value}")  # in one word: a value may begin with a dash
    return [*chosen, *options.torchrun_args], replaced


def _rdzv_conf(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> str:
    # Without is_host torchrun guesses from the host's own name, which need not resolve.
    pairs = [f"is_host={int(cluster.node_rank == 0)}"]
    typed: list[str] = []  # by the user, as options of ours
    if cluster.nnodes > 1:
        # If the first host is late, the others fail on read_timeout; if another one is late, on
        # join_timeout.
        longest = max(options.start_timeout, options.restart_timeout or 0)
        timeouts = [f"{name}_timeout={longest}" for name in ("read", "join")]
        is_typed = {"start_timeout", "restart_timeout"} & options.given
        (typed if is_typed else pairs).extend(timeouts)
        if "host_timeout" in options.given:  # torchrun's own are 3 of 5 s
            typed += [f"keep_alive_interval={-(-options.host_timeout // 3)}"]
            typed += ["keep_alive_max_attempt=3"]
    users = environ.get("PET_RDZV_CONF")
    if users:
        pairs.append(users)
    return ",".join([*pairs, *typed])  # of a key given twice the last counts


def _nproc_per_node(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> int | str:
    """Return the number of processes of this host, or torchrun's word for it (gpu, cpu).

    Raises LaunchError for an invalid PET_NPROC_PER_NODE, and for more than the Neuron cores.
    """
    text = environ.get("PET_NPROC_PER_NODE", "")
    where = "PET_NPROC_PER_NODE"
    if not text or "nproc_per_node" in options.given:
        nproc, where = _own_nproc(options, cluster), flag("nproc_per_node")
    elif text in COUNTED:
        return text
    else:
        try:
            nproc = RANKS(text)
        except ValueError as error:
            raise LaunchError(f"{where} is {text!r}; expected {error}, or gpu.") from None
    if nproc > cluster.num_neurons > 0 and not cluster.num_gpus:
        from launcher.job import neuron  # only for this error

        raise neuron.too_many(nproc, where, cluster)
    return nproc


def _own_nproc(options: Options, cluster: Cluster) -> int:
    return options.nproc_per_node or cluster.num_gpus or cluster.num_neurons or 1


def _of_slices(nproc: int | str, options: Options, cluster: Cluster) -> str:
    """Return what to say of a host whose GPUs are divided into MIG slices, "" if nothing."""
    shown = "a process can use at most one MIG slice"
    if isinstance(nproc, int) and nproc > 1 and cluster.mig:
        return (
            f"{shown}: each of the {nproc} ranks sees the same one, unless the script sets "
            "CUDA_VISIBLE_DEVICES before it uses CUDA."
        )
    if cluster.mig > 1 and nproc == 1 and options.nproc_per_node is None:
        return (
            f"{shown}, so this host has 1 rank: choose its slice with "
            "CUDA_VISIBLE_DEVICES=MIG-... (see nvidia-smi -L). To start more ranks, use "
            f"{flag('nproc_per_node')} N and have each of them set CUDA_VISIBLE_DEVICES "
            "itself."
        )
    return ""


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
    for text in (*plan.argv, *plan.environment.values(), *plan.environment):
        try:
            is_text = b"\0" not in os.fsencode(text)
        except UnicodeEncodeError:
            is_text = False
        if not is_text:
            raise LaunchError(
                f"{text[:200]!r} cannot be passed to a process; expected text without NUL "
                "characters or lone surrogates."
            )
    for name in plan.environment:
        if "=" in name:
            raise LaunchError(
                f"{name!r} cannot be the name of an environment variable; "
                "rename the hyperparameter."
            )
