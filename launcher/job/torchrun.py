"""torchrun's options for this host, and what its PET_ variables say in place of them.

The comments say what goes wrong without an option, as seen in torchrun's source and in trials.
`torchrun` and `torch.distributed.run` are the same program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import LaunchError
from launcher.job.job import Cluster, endpoint_at
from launcher.job.options import COUNTED, OPTIONS, RANKS, Options, names
from launcher.job.resources import Resources
from launcher.text.words import flag, short

SAGEMAKER_KILLS_AFTER = 120  # seconds, from SIGTERM to SIGKILL


def refuse_conflicts(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Raise LaunchError for settings of torchrun's, or ports, that cannot work with this job."""
    _refuse_modes(options, cluster, environ)
    _refuse_backend(cluster, environ)
    if options.rdzv_port == options.peer_port:
        raise LaunchError(
            f"{flag('rdzv_port')} and {flag('peer_port')} are both {options.rdzv_port}; "
            "expected two different ports."
        )
    _refuse_elastic(options, cluster, environ)


def _refuse_backend(cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Refuse a rendezvous that the hosts cannot meet by: no etcd is here, nor a node rank."""
    backend = environ.get("PET_RDZV_BACKEND") or "c10d"
    if backend != "c10d" and (backend, cluster.nnodes) != ("static", 1):
        raise LaunchError(
            f"PET_RDZV_BACKEND is {short(backend)}; expected c10d, or the variable to be unset."
        )


def _refuse_modes(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Refuse torchrun modes that would not run rank.py, or would make a job of each host."""
    for variable in ("PET_MODULE", "PET_NO_PYTHON", "PET_RUN_PATH"):
        if environ.get(variable, "0") != "0":
            raise LaunchError(
                f"{variable} is {environ[variable]!r}; expected it to be unset: use "
                "--train-script PATH or --train-module NAME."
            )
    standalone = any(names(word, "--standalone") for word in options.torchrun_args)
    if cluster.nnodes > 1 and (standalone or environ.get("PET_STANDALONE", "0") != "0"):
        raise LaunchError(
            "torchrun's standalone mode is set on a cluster of several hosts, where each "
            "would train by itself; remove --standalone, and unset PET_STANDALONE."
        )


def _refuse_elastic(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Refuse a number of hosts other than the job's: torchrun would wait, or leave some out."""
    text = environ.get("PET_NNODES", "")
    count = str(cluster.nnodes)
    if text in ("", count, f"{count}:{count}") or "instance_groups" in options.given:
        return
    raise LaunchError(
        f"PET_NNODES is {short(text)}; expected it to be unset, or {count}: SM_HOSTS and "
        f"{flag('instance_groups')} determine the job's hosts."
    )


def flags(
    options: Options, cluster: Cluster, resources: Resources, environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return torchrun's options, and a remark for each that the user's PET_ variable replaces."""
    chosen = [
        f"--nnodes={cluster.nnodes}",
        f"--rdzv-conf={_rdzv_conf(options, cluster, environ)}",
        "--max-restarts=0",  # the launchers restart ranks
    ]
    restarts = environ.get("PET_MAX_RESTARTS") or "0"
    replaced = []
    if restarts != "0" and "max_restarts" not in options.given:
        replaced.append(f"PET_MAX_RESTARTS={restarts} is used instead of 0.")
    for name, (value, field) in _values(options, cluster, resources, environ).items():
        # An option on the command line would win over the user's PET_ variable for it.
        variable = "PET_" + name.upper().replace("-", "_")
        if environ.get(variable) and field not in options.given:
            if environ[variable] != value:
                replaced.append(f"{variable}={environ[variable]} is used instead of {value}.")
        else:
            chosen.append(f"--{name}={value}")  # in one word: a value may begin with a dash
    return [*chosen, *options.torchrun_args], replaced


def _values(
    options: Options, cluster: Cluster, resources: Resources, environ: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return the values of torchrun's options, each with the field of ours that sets it, or ""."""
    first = cluster.address(cluster.hosts[0])
    values = {
        "nproc-per-node": (str(_own_nproc(options, cluster)), "nproc_per_node"),
        "rdzv-backend": ("c10d", ""),
        "rdzv-endpoint": (
            endpoint_at(cluster, options, first),
            "rdzv_port",
        ),
        "rdzv-id": (cluster.job_name, ""),
        # Also what the ranks get as MASTER_ADDR, in place of a name that may not resolve.
        "local-addr": (
            cluster.address(cluster.current_host) if cluster.nnodes > 1 else "localhost",
            "",
        ),
    }
    if options.log_dir and has_files_of_torchruns(options, environ):
        values["log-dir"] = (options.log_dir, "log_dir")
    if resources.torch_version >= (2, 12):
        # How long the ranks' keepers have if torchrun ends before the job.
        values["shutdown-timeout"] = (str(options.grace), "grace")
    return values


def has_files_of_torchruns(options: Options, environ: Mapping[str, str]) -> bool:
    """Tell whether the user has torchrun itself write what ranks print, into its log folder."""
    if any(
        environ.get(variable, "0") not in ("", "0") for variable in ("PET_TEE", "PET_REDIRECTS")
    ):
        return True
    flags = ("--tee", "--redirects", "-t", "-r")
    return any(names(word, one) for word in options.torchrun_args for one in flags)


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


def nproc_per_node(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> int | str:
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


def of_slices(nproc: int | str, options: Options, cluster: Cluster) -> str:
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


def with_own_variables(options: Options, environ: Mapping[str, str]) -> Options:
    """Return the options as they count: what is not given, torchrun's own variables may say.

    Raises LaunchError.
    """
    counts: dict[str, Any] = {}
    for variable, field in (
        ("PET_MAX_RESTARTS", "max_restarts"),
        ("PET_SHUTDOWN_TIMEOUT", "grace"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "grace"),
    ):
        text = environ.get(variable)
        if text and field not in {*options.given, *counts}:
            try:
                counts[field] = OPTIONS[field].parse(text)
            except ValueError as error:
                raise LaunchError(f"{variable} is {short(text)}; expected {error}.") from None
    return options._replace(**counts)
