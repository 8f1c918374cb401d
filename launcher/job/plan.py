"""The torchrun command of this host, and the environment it adds. Nothing is started here.

What torchrun does with each of these settings was read in its source and run; the comments
say what goes wrong without them. The words `torchrun` and `torch.distributed.run` mean the
same program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher import __version__
from launcher.errors import LaunchError, short
from launcher.job.cluster import Cluster
from launcher.job.machine import Machine
from launcher.job.options import MASTER_ADDR, Options, flag, names, whole
from launcher.peers.addresses import counted, some_of

_RUN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "run")
AGENT = os.path.join(_RUN, "agent.py")
RANK = os.path.join(_RUN, "rank.py")


class LaunchPlan(NamedTuple):
    """One host's share of the job, ready to be started.

    `nproc_per_node` is torchrun's own word for it ("2", or what PET_NPROC_PER_NODE says);
    `environment` holds only what is added to the launcher's own.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cluster: Cluster
    nproc_per_node: str
    rdzv_endpoint: str
    grace: int  # seconds that a stop leaves the ranks
    failure_grace: int  # seconds for a failed rank to end, and then for the others
    remarks: tuple[str, ...]  # for the log: what was decided, and why
    alike: Mapping[str, Any] = {}  # what has to be the same on every host, in words for a message

    def summary(self) -> str:
        """Return the line that says who does what: the order of hosts is that of their ranks."""
        cluster = self.cluster
        text = (
            f"{cluster.current_host} is node {cluster.node_rank} of {cluster.nnodes} "
            f"in job {cluster.job_name}, with {self.nproc_per_node} process(es)"
        )
        if cluster.nnodes > 1:
            named = some_of(cluster.hosts)
            hosts = counted(named, cluster.nnodes - len(named))
            text += f"; {hosts} meet at {self.rdzv_endpoint}"
        return text + "."

    def command(self) -> str:
        """Return the command with the environment it adds, to be pasted into a shell."""
        import shlex  # only people need it

        words = [shlex.quote(f"{name}={value}") for name, value in self.environment.items()]
        return " \\\n    ".join(["env", *words, shlex.join(self.argv)])


def make_plan(
    options: Options,
    cluster: Cluster,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    added: Mapping[str, str],
) -> LaunchPlan:
    """Turn what is known into one torchrun command.

    `added` are variables that the ranks need besides those that are worked out here: the
    `SM_*` of an image without the toolkit. Raises LaunchError for settings that contradict
    each other, and for text that no process can be given.
    """
    several = cluster.nnodes > 1
    _refuse_modes(options, environ, several=several)
    if options.rdzv_port == options.peer_port:
        raise LaunchError(
            f"{flag('rdzv_port')} and {flag('peer_port')} are both {options.rdzv_port}; "
            "expected two different ports."
        )
    _refuse_elastic(options, cluster, environ)
    own_nproc = options.nproc_per_node or cluster.num_gpus or cluster.num_neurons or 1
    nproc = _nproc_per_node(options, own_nproc, environ)
    # "localhost:0" is a free port of torchrun's own: two jobs on one machine do not collide.
    endpoint = _endpoint(cluster.hosts[0], options.rdzv_port) if several else "localhost:0"
    # Without is_host torchrun guesses from the host's own name, which need not resolve.
    rdzv_conf = [f"is_host={int(cluster.node_rank == 0)}"]
    if several:
        # A late first host fails the others on read_timeout, a late other one on join_timeout.
        rdzv_conf += [f"{name}_timeout={options.start_timeout}" for name in ("read", "join")]
    users_conf = environ.get("PET_RDZV_CONF")
    if users_conf:
        if not all("=" in pair for pair in users_conf.split(",")):
            raise LaunchError(
                f"PET_RDZV_CONF is {users_conf!r}; expected KEY=VALUE pairs with commas between."
            )
        # Of a key given twice the last counts.
        rdzv_conf.insert(1 if "start_timeout" in options.given else len(rdzv_conf), users_conf)
    # torchrun's option: what the launcher makes of it, and the option of ours that governs it
    derived = {
        "nproc-per-node": (str(own_nproc), "nproc_per_node"),
        "rdzv-backend": ("c10d", ""),
        "rdzv-endpoint": (endpoint, "rdzv_port"),
        "rdzv-id": (cluster.job_name, ""),
        # Also what the ranks get as MASTER_ADDR, in place of a name that nobody may know.
        "local-addr": (cluster.current_host if several else "localhost", ""),
        "max-restarts": (str(options.max_restarts), "max_restarts"),
    }
    if options.log_dir:
        derived["log-dir"] = (options.log_dir, "log_dir")
        derived["tee"] = ("3", "")  # without it torchrun writes no log there
    grace = _grace(options, environ)
    remarks = []
    if machine.torch_version >= (2, 12):
        # The launcher gives it this at every stop (agent.py); this is for one without a launcher.
        derived["shutdown-timeout"] = (str(grace), "grace")
    argv = [machine.python, AGENT, f"--nnodes={cluster.nnodes}"]
    argv.append(f"--rdzv-conf={','.join(rdzv_conf)}")
    for name, (value, option) in derived.items():
        # A flag on the command line would beat the user's PET_ variable of the same setting.
        variable = "PET_" + name.upper().replace("-", "_")
        if environ.get(variable) and option not in options.given:
            if environ[variable] != value:
                remarks.append(f"{variable}={environ[variable]} is used in place of {value}.")
        else:
            argv.append(f"--{name}={value}")  # in one word: a value may begin with a dash
    argv += options.torchrun_args
    # Without "--" torchrun takes a script's --log or --node for its own --log-dir or --nnodes.
    argv += ["--", RANK]
    if options.train_module:
        script = ["module", options.train_module]
    else:
        script = ["script", options.train_script]
    # torchrun substitutes ${local_rank} and the like in arguments; "$$" stands for "$".
    argv += [word.replace("$", "$$") for word in (*script, *options.script_args)]

    tuned, why = _tuning(nproc, cluster, machine, environ)
    remarks += why
    plan = LaunchPlan(
        argv=tuple(argv),
        environment={**added, **tuned},
        cluster=cluster,
        nproc_per_node=str(nproc),
        rdzv_endpoint=endpoint,
        grace=grace,
        failure_grace=options.failure_grace,
        remarks=tuple(remarks),
        alike={
            "version of the launcher": __version__,
            "version of torch": ".".join(map(str, machine.torch_version)),
            "rendezvous endpoint": endpoint,
            "script": " ".join(script),
            "script's arguments": list(options.script_args),
        },
    )
    _check_text(plan)
    return plan


def at_address(plan: LaunchPlan, address: str, interface: str, *, has_name: bool) -> LaunchPlan:
    """Return the plan of a host that the others reach at an address.

    gloo has to use the interface with that address: it takes what the host's own name leads to,
    and that may be the loopback. Where a host cannot look its own name up, `has_name` is false:
    then its torchrun gets the address to keep the store at, and to tell all ranks as MASTER_ADDR.
    """
    cluster = plan.cluster
    added: dict[str, str] = {}
    if interface:
        added["GLOO_SOCKET_IFNAME"] = interface
    argv = plan.argv
    if cluster.node_rank == 0 and not has_name:
        added[MASTER_ADDR] = address
        endpoint = _endpoint(address, int(plan.rdzv_endpoint.rpartition(":")[2]))
        option = "--rdzv-endpoint="
        argv = tuple(
            option + endpoint if word == option + plan.rdzv_endpoint else word for word in argv
        )
    if not added:
        return plan
    reasons = ", ".join(f"{name}={value}" for name, value in added.items())
    remark = f"the other hosts reach {cluster.current_host} at {address}: {reasons}."
    return plan._replace(
        argv=argv, environment={**plan.environment, **added}, remarks=(*plan.remarks, remark)
    )


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refuse_modes(options: Options, environ: Mapping[str, str], *, several: bool) -> None:
    """Refuse torchrun switches that would not run rank.py, or would make each host a job."""
    for variable in ("PET_MODULE", "PET_NO_PYTHON", "PET_RUN_PATH"):
        if environ.get(variable, "0") != "0":
            raise LaunchError(
                f"{variable} is {environ[variable]!r}; expected it unset: "
                "use --train-script PATH or --train-module NAME."
            )
    standalone = any(names(word, "--standalone") for word in options.torchrun_args)
    if several and (standalone or environ.get("PET_STANDALONE", "0") != "0"):
        raise LaunchError(
            "torchrun's standalone mode is asked for on a cluster of several hosts, where each "
            "would train by itself; expected --standalone and PET_STANDALONE unset."
        )


def _refuse_elastic(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Refuse another number of hosts than there are: torchrun would wait, or leave some out."""
    text = environ.get("PET_NNODES", "")
    count = str(cluster.nnodes)
    if text in ("", count, f"{count}:{count}") or "instance_groups" in options.given:
        return
    raise LaunchError(
        f"PET_NNODES is {short(text)}; expected it unset, or {count}: the job has the hosts "
        f"of SM_HOSTS and {flag('instance_groups')}, the same from start to end."
    )


def _nproc_per_node(options: Options, own: int, environ: Mapping[str, str]) -> int | str:
    """Return the processes of this host; a word of torchrun's own (gpu, cpu) as it is."""
    text = environ.get("PET_NPROC_PER_NODE", "")
    if not text or "nproc_per_node" in options.given:
        return own
    if text in ("auto", "cpu", "gpu", "xpu"):
        return text
    try:
        return whole(1, 1024)(text)
    except ValueError as error:
        raise LaunchError(f"PET_NPROC_PER_NODE is {text!r}; expected {error}, or gpu.") from None


def _grace(options: Options, environ: Mapping[str, str]) -> int:
    """Return the seconds that a stop leaves the ranks; torchrun's own variables count too."""
    if "grace" not in options.given:
        for variable in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
            try:
                return whole(0, 86400)(environ[variable])
            except (KeyError, ValueError):
                pass  # not there, or for torchrun to refuse
    return options.grace


def _tuning(
    nproc: int | str, cluster: Cluster, machine: Machine, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to add for speed, and a line that says why.

    Nothing that the user set is overwritten.
    """
    wanted: list[tuple[str, str, str]] = []
    if isinstance(nproc, int):
        # torchrun would force 1 thread a process, and torch alone takes no notice of quotas.
        threads = max(1, machine.cores // nproc)
        why = f"usable cores {machine.cores} / processes {nproc}"
        wanted.append(("OMP_NUM_THREADS", str(threads), why))
    if cluster.nnodes > 1:
        interface = cluster.network_interface_name
        # SDK v3's local mode names an interface that the container does not have.
        if interface in machine.interfaces:
            wanted.append(("NCCL_SOCKET_IFNAME", interface, "the interface SageMaker names"))
            wanted.append(("GLOO_SOCKET_IFNAME", interface, "the same"))
        elif machine.own_interface:
            # gloo takes the loopback, and waits for ever, where the host's own name is unknown.
            why = f"it has the address of {cluster.current_host}"
            wanted.append(("GLOO_SOCKET_IFNAME", machine.own_interface, why))
        if machine.efa:
            wanted.append(("FI_PROVIDER", "efa", "this host has an EFA device"))
        # Containers of one machine share what NCCL tells machines apart by.
        wanted.append(("NCCL_HOSTID", cluster.current_host, "the name of this host"))
    tuned = [item for item in wanted if item[0] not in environ]
    if not tuned:
        return {}, []
    reasons = ", ".join(f"{name}={value} ({why})" for name, value, why in tuned)
    return {name: value for name, value, _ in tuned}, [f"environment: {reasons}."]


def _check_text(plan: LaunchPlan) -> None:
    """Refuse what execve cannot carry; it can come from hyperparameters.json only."""
    for text in (*plan.argv, *plan.environment.values()):
        _encode(text)
    for name in plan.environment:
        if "=" in name:
            raise LaunchError(f"a variable cannot be called {name!r}; rename the hyperparameter.")
        _encode(name)


def _encode(text: str) -> None:
    try:
        if b"\0" not in os.fsencode(text):
            return
    except UnicodeEncodeError:
        pass
    raise LaunchError(
        f"{text[:200]!r} cannot be handed to a process; "
        "expected text without NUL characters and lone surrogates."
    )
