"""The torchrun command of this host, and the environment it adds. Nothing is started here.

The comments say what goes wrong without an option, as seen in torchrun's source and in trials.
`torchrun` and `torch.distributed.run` are the same program. Its PET_ variables override the
launcher's own choice, but not an option that the user gives.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from launcher import PACKAGE, __version__
from launcher.errors import LaunchError, NotFoundError, UnexpectedError
from launcher.job.job import Job, LaunchPlan
from launcher.job.options import COUNTED, MOST_RANKS, Options, checked, whole
from launcher.job.resources import Resources
from launcher.text.words import flag, plural, short

STUB = os.path.join(PACKAGE, "run", "stub.py")
COMPILE = "neuron_parallel_compile"  # in front of torchrun, on a host with Neuron cores
_COMPILES = "RUN_NEURON_PARALLEL_COMPILE"
_TARGET = "--train-module NAME or --train-script PATH"
# torchrun's options that the launcher sets, and what to use in their place.
_SET_BY_LAUNCHER = {
    "module": _TARGET,
    "no_python": _TARGET,
    "run_path": _TARGET,
    "nproc_per_node": flag("nproc_per_node"),
    "max_restarts": flag("max_restarts"),
    "log_dir": flag("log_dir"),
    "rdzv_endpoint": flag("rdzv_port"),
    "shutdown_timeout": flag("grace"),
    "nnodes": f"{flag('instance_groups')} for fewer hosts than all",
}
_LONGEST = 128 * 1024  # bytes of one string of an environment, with its NUL (execve(2))
SAGEMAKER_KILLS_AFTER = 120  # seconds, from SIGTERM to SIGKILL


def command(plan: LaunchPlan, folder: str = "") -> str:
    """Return plain torchrun's command for a shell, with its folder and added variables."""
    import shlex  # only a dry run needs it

    words = [shlex.quote(f"{name}={value}") for name, value in plan.environment.items()]
    begin = f"cd {shlex.quote(folder)} && env" if folder else "env"
    return " \\\n    ".join([begin, *words, shlex.join(_plain(plan.argv))])


def _plain(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command without keepers, which need a launcher."""
    begin = argv.index("--no-python")
    kind, *words = argv[begin + len(_stub("")) :]
    return (*argv[:begin], *(["--module"] if kind == "module" else []), "--", *words)


def _stub(python: str) -> tuple[str, ...]:
    """Return torchrun's arguments that start a stub, whose keeper starts and ends the rank."""
    # Without "--" torchrun takes a script's --log or --node for its own --log-dir or --nnodes.
    return ("--no-python", "--", python, "-I", "-S", STUB.replace("$", "$$"))


def make_plan(
    job: Job, resources: Resources, environ: Mapping[str, str], *, added: Mapping[str, str]
) -> LaunchPlan:
    """Turn all facts into one torchrun command of a job, which has no plan yet.

    `added` are further variables for the ranks: the `SM_*` of an image without the toolkit, and its
    PYTHONPATH. Raises LaunchError for settings that contradict each other, and for text that cannot
    be passed to a process.
    """
    options, planning = job.options, _Planning(job, resources, {**environ, **added})
    planning.refuse_conflicts()
    nproc = planning.nproc_per_node()
    runner = planning.runner()
    library, for_library = planning.smddp()
    for_speed, reasons = planning.tuned(nproc)
    # torchrun replaces ${local_rank} and the like in arguments; "$$" stands for "$".
    words = [word.replace("$", "$$") for word in (*_target(options), *options.script_args)]
    torchrun = (resources.python, "-m", "torch.distributed.run", *planning.flags())
    plan = LaunchPlan(
        argv=(*filter(None, [runner]), *torchrun, *_stub(resources.python), *words),
        environment={**added, **for_speed, **for_library},
        nproc_per_node=str(nproc),
        program=planning.program(),
        reasons=reasons,
        warm=planning.is_warm(runner),
        remark=" ".join(planning.remarks),
        fingerprint={
            "version of the launcher": __version__,
            "version of torch": ".".join(map(str, resources.torch_version)),
            "rendezvous endpoint": job.endpoint,
            "script": " ".join(_target(options)),
            "script's arguments": list(options.script_args),
            "program that runs torchrun": runner or "none",
            f"smdistributed.dataparallel ({flag('smddp_compat')})": library,
        },
        runner=runner,
        tees=planning.tees,
        master_addr=planning.master_addr(),
    )
    _check_text(plan)
    return plan


def _target(options: Options) -> tuple[str, str]:
    """Return the stub's arguments KIND and TARGET."""
    if options.train_module:
        return "module", options.train_module
    return "script", options.train_script


class _Planning:
    """The steps of a plan, which share the same facts. `remarks` are for the log.

    `users` are the user's own settings of torchrun, by the fields of its options; `where` are the
    names under which the user gave them.
    """

    def __init__(self, job: Job, resources: Resources, environ: Mapping[str, str]) -> None:
        self.job, self.resources, self.environ = job, resources, environ
        self.options, self.cluster = options, cluster = job.options, job.cluster
        self.remarks: list[str] = []
        variables = [name for name in environ if name.startswith("PET_")]
        self.where = {name.removeprefix("PET_").lower(): name for name in variables}
        self.users = {field: environ[name] for field, name in self.where.items()}
        if options.torchrun_args:
            typed = settings_of(options.torchrun_args, resources.torchrun)
            self.users |= typed
            self.where |= {name: f"{flag('torchrun_args')} ({name})" for name in typed}
        # torchrun itself writes the ranks' output.
        copies = [self.users.get(name, "") for name in ("tee", "redirects", "logs_specs")]
        self.tees = not {*copies} <= {"", "0", "default"}
        self.derived_nproc = options.nproc_per_node or cluster.num_gpus or cluster.num_neurons or 1
        self._ranks_python = environ.get("PYTHON_EXEC") or resources.python

    def refuse_conflicts(self) -> None:
        """Raise LaunchError for settings that cannot work with this job."""
        options, nnodes = self.options, self.cluster.nnodes
        # Modes that would bypass the stub, or make a separate job of each host.
        ours = "it to be unset: use --train-script PATH or --train-module NAME"
        accepted = dict.fromkeys(("module", "no_python", "run_path"), (["0"], ours))
        # Other rendezvous cannot work: there is no etcd, nor a node rank.
        backends = ["c10d", "static"] if nnodes == 1 else ["c10d"]
        accepted["rdzv_backend"] = (backends, "c10d, or none")
        if nnodes > 1:
            alone = "none on a cluster of several hosts, where each would train by itself"
            accepted["standalone"] = (["0"], alone)
        # With another number of hosts, torchrun would wait for more, or leave some out.
        if "instance_groups" not in options.given:
            why = f"SM_HOSTS and {flag('instance_groups')} determine the job's hosts"
            values = [f"{nnodes}", f"{nnodes}:{nnodes}"]
            accepted["nnodes"] = (values, f"it to be unset, or {nnodes}: {why}")
        for name, (values, expected) in accepted.items():
            if self.users.get(name) and self.users[name] not in values:
                raise UnexpectedError(self.where[name], self.users[name], expected)
        if options.hang_timeout < math.inf and not options.watch:
            raise LaunchError(
                f"{flag('hang_timeout')} needs the progress checks that {flag('watch')} 0 turns "
                "off; remove one of the two."
            )
        if options.rdzv_port == options.peer_port:
            raise LaunchError(
                f"{flag('rdzv_port')} and {flag('peer_port')} are both {options.rdzv_port}; "
                "expected two different ports."
            )

    def nproc_per_node(self) -> int | str:
        """Return the number of processes of this host, or torchrun's word for it (gpu, cpu).

        Raises LaunchError for an invalid PET_NPROC_PER_NODE, for more than the Neuron cores, and
        for ranks to be shown that the job does not have.
        """
        cluster, options, where = self.cluster, self.options, flag("nproc_per_node")
        nproc, users = self.derived_nproc, self.users.get("nproc_per_node")
        if users and "nproc_per_node" not in options.given:
            if users in COUNTED:
                return users
            where = self.where["nproc_per_node"]
            nproc = checked(where, users, whole(1, MOST_RANKS))
        if nproc > cluster.num_neurons > 0 and not cluster.num_gpus:
            # Each process reserves a core: the last ones would fail late, in the runtime.
            cores = plural(cluster.num_neurons, "Neuron core")
            raise LaunchError(
                f"{where} is {nproc}, but {cluster.current_host} has {cores} (SM_NUM_NEURONS, else "
                f"neuron-ls -j); expected at most {cluster.num_neurons}, one core per process."
            )
        is_alike = cluster.nnodes == 1 or "nproc_per_node" in options.given
        last = max((ranks[-1] for ranks in options.log_ranks), default=-1)
        if is_alike and last >= nproc * cluster.nnodes:  # otherwise hosts may have more
            ranks = f"ranks from 0 to {nproc * cluster.nnodes - 1}"
            raise LaunchError(f"{flag('log_ranks')} names rank {last}; expected {ranks}.")
        has_idle_slices = cluster.mig > 1 and options.nproc_per_node is None
        if cluster.mig and (nproc > 1 or has_idle_slices):
            self.remarks.append(
                "a process can use at most one MIG slice, and this host has "
                f"{plural(nproc, 'rank')} ({flag('nproc_per_node')}): each of the ranks sees the "
                "same slice, unless it sets CUDA_VISIBLE_DEVICES=MIG-... before it uses CUDA (see "
                "nvidia-smi -L)."
            )
        return nproc

    def flags(self) -> list[str]:
        """Return torchrun's options, without those for which the user's PET_ variable counts."""
        options, cluster = self.options, self.cluster
        first, this = map(cluster.address, (cluster.hosts[0], cluster.current_host))
        values = {  # each with our option that sets it, or ""
            "max-restarts": ("0", "max_restarts"),  # launchers restart, not torchrun
            "nproc-per-node": (f"{self.derived_nproc}", "nproc_per_node"),
            "rdzv-backend": ("c10d", ""),
            "rdzv-endpoint": (self.job.endpoint_at(first), "rdzv_port"),
            "rdzv-id": (cluster.job_name, ""),
            # Ranks also get it as MASTER_ADDR, in place of a name that may not resolve.
            "local-addr": (this if cluster.nnodes > 1 else "localhost", ""),
        }
        if options.log_dir and self.tees:
            values["log-dir"] = (os.path.abspath(options.log_dir), "log_dir")
        if self.resources.torch_version >= (2, 12):
            # If torchrun gets a stop, too, its store has to last while ranks save. It may not kill
            # stubs before they have told that; its own default is 30 s.
            values["shutdown-timeout"] = (f"{max(options.grace, 30)}", "grace")
        flags = [f"--nnodes={cluster.nnodes}"]
        for name, (value, field) in values.items():
            variable = "PET_" + name.upper().replace("-", "_")
            users = "" if field in options.given else self.environ.get(variable, "")
            if users not in ("", value):
                self.remarks.append(f"{variable}={users} is used instead of {value}.")
            if not users or name == "max-restarts":
                flags.append(f"--{name}={value}")  # in one word: a value may begin with a dash
        # This last, and with what the user gives of it: the last of two counts.
        return [*flags, *options.torchrun_args, f"--rdzv-conf={self._rdzv_conf()}"]

    def _rdzv_conf(self) -> str:
        options, cluster = self.options, self.cluster
        # Without is_host torchrun guesses from the host's own name, which need not resolve.
        pairs = [f"is_host={int(cluster.node_rank == 0)}"]
        typed: list[str] = []  # the user's own launcher options
        if cluster.nnodes > 1:
            # If the first host is late, the others fail on read_timeout; if another one is late,
            # on join_timeout.
            longest = max(options.start_timeout, options.restart_timeout or 0)
            is_typed = {"start_timeout", "restart_timeout"} & options.given
            (typed if is_typed else pairs).append(f"read_timeout={longest},join_timeout={longest}")
            if "host_timeout" in options.given:  # torchrun's own are 3 of 5 s
                seconds = -(-options.host_timeout // 3)
                typed.append(f"keep_alive_interval={seconds},keep_alive_max_attempt=3")
        # The last of two equal keys counts.
        return ",".join(filter(None, [*pairs, self.users.get("rdzv_conf"), *typed]))

    def tuned(self, nproc: int | str) -> tuple[dict[str, str], str]:
        """Return the variables that make ranks fast, and their log line, if any.

        The user's own variables are not overwritten.
        """
        cluster, resources = self.cluster, self.resources
        wanted: list[tuple[str, str, str]] = []  # each a variable, its value, and why
        if isinstance(nproc, int):
            # torchrun would set 1 thread for each process, and torch by itself ignores CPU quotas.
            cores, threads = resources.cores, max(1, resources.cores // nproc)
            why = f"{plural(cores, 'usable core')} for {plural(nproc, 'process', 'es')}"
            wanted.append(("OMP_NUM_THREADS", f"{threads}", why))
        if cluster.nnodes > 1:
            interface = cluster.network_interface_name
            # SDK v3's local mode names an interface that the container does not have.
            if interface in resources.interfaces:
                for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
                    wanted.append((name, interface, "from resourceconfig.json"))
            if resources.efa:
                wanted.append(("FI_PROVIDER", "efa", "this host has an EFA device"))
            # NCCL cannot tell the containers of one machine apart without it.
            wanted.append(("NCCL_HOSTID", cluster.current_host, "this host's name"))
        settings = [setting for setting in wanted if setting[0] not in self.environ]
        reasons = ", ".join(f"{name}={value} ({why})" for name, value, why in settings)
        made = {name: value for name, value, _ in settings}
        return made, f"environment: {reasons}" if settings else ""

    def runner(self) -> str:
        """Return the program that runs torchrun, "" if torchrun runs directly.

        As in SageMaker's toolkit (torch_distributed.py), only the value 1 turns it on. Raises
        LaunchError (exit code 127) if it is not installed.
        """
        if self.environ.get(_COMPILES) != "1":
            return ""
        import shutil  # 2.4 ms, with what it imports

        if shutil.which(COMPILE, path=self.environ.get("PATH")) is None:
            raise NotFoundError(
                f"{_COMPILES} is 1, but {COMPILE} is not in PATH; install torch-neuronx, which "
                f"provides it, or unset {_COMPILES}."
            )
        self.remarks.append(
            f"{COMPILE} runs torchrun: the job compiles its graphs and does not train."
        )
        return COMPILE

    def smddp(self) -> tuple[str, Mapping[str, str]]:
        """Return which smdistributed.dataparallel ranks import, and its variables."""
        if not self.options.smddp_compat:
            return "none", {}
        from launcher.job import smddp  # most jobs do not need it

        library, variables, remark = smddp.chosen(self.environ)
        self.remarks.append(remark)
        return library, variables

    def is_warm(self, runner: str) -> bool:
        """Tell whether ranks are forked from a process that has imported torch."""
        if self.options.start != "warm":
            return False
        python = self._ranks_python
        other = runner or (python if python != self.resources.python else "")
        if other:
            self.remarks.append(
                f"{flag('start')} warm falls back to cold: {other} runs torchrun or the ranks."
            )
        return not other

    def program(self) -> str:
        """Return the program and its versions. PYTHON_EXEC's may differ."""
        options, resources = self.options, self.resources
        script = options.train_script or f"the module {options.train_module}"
        python = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
        if self._ranks_python != resources.python:
            python += f" (ranks: PYTHON_EXEC={self._ranks_python})"
        return f"{script} with torch {resources.torch}, {python} and sm-launch {__version__}"

    def master_addr(self) -> str:
        """Return the ranks' MASTER_ADDR if it replaces torchrun's, "" if torchrun's is right.

        Torch 2.4 uses the first host's own name (getfqdn), which may not resolve.
        """
        if self.resources.torch_version >= (2, 5):
            return ""
        cluster = self.cluster
        return cluster.address(cluster.hosts[0]) if cluster.nnodes > 1 else "localhost"


def _check_text(plan: LaunchPlan) -> None:
    """Refuse text that execve cannot pass on; only hyperparameters.json can hold any."""
    invalid = [name for name in plan.environment if "=" in name]
    for text in (*invalid, *map("=".join, plan.environment.items()), *plan.argv):
        try:
            data = os.fsencode(text)
        except UnicodeEncodeError:  # a lone surrogate; or text that this locale lacks
            data = b"\0"
        if text in invalid or b"\0" in data or len(data) >= _LONGEST:
            raise LaunchError(
                f"{short(text)} cannot be passed to a process; expected less than {_LONGEST >> 10} "
                f"KiB that {sys.getfilesystemencoding()} can encode, without NUL characters, or = "
                "in a hyperparameter's name."
            )


# --launcher-torchrun-args, read as torchrun itself does. torchrun runs the first word that is
# neither one of its options nor the value of one. Its options depend on its version, and importing
# it takes a second: so its parser is rebuilt from its source's text, with argparse, which knows the
# rest.


def settings_of(words: Sequence[str], source: str) -> Mapping[str, str]:
    """Return the values of torchrun's options in some words, by the options' fields.

    A switch has the value 1. `source` is that of torch/distributed/run.py. Raises LaunchError for
    words that torchrun would refuse, or would run, and for options that the launcher sets.
    """
    try:
        given, others = parser_of(source).parse_known_args(words)
        if others or "--" in words:
            word = next((word for word in words if word in others), "--")
            raise ValueError(f"{short(word)} is neither an option of this torchrun nor a value")
        for name in vars(given):
            if name in _SET_BY_LAUNCHER:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is the launcher's to set: use {_SET_BY_LAUNCHER[name]}")
    except ValueError as error:
        import shlex  # as in `command`

        expected = f"options of torchrun and their values ({error})"
        raise UnexpectedError(flag("torchrun_args"), shlex.join(words), expected) from None
    return {name: str(value) for name, value in vars(given).items()}


def parser_of(source: str) -> Any:
    """Return a parser with torchrun's options, without argparse's own; it raises ValueError."""
    import argparse  # 5 ms of CPU, with ast, that most jobs need not spend
    import ast

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser: Any = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.error = refuse
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
            if names and names[0].startswith("-"):
                # torchrun's own action for switches; it checks values itself.
                is_switch = any(getattr(k.value, "id", "") == "check_env" for k in node.keywords)
                switch = {"action": "store_const", "const": "1"} if is_switch else {}
                parser.add_argument(*names, **switch)
    return parser
