"""One job, seen from one of its hosts: the facts that do not change while it runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher.job.options import Options
from launcher.text.words import listed, other_port, plural


class Cluster(NamedTuple):
    """The hosts of one job, seen from one of them."""

    hosts: tuple[str, ...]  # sorted as strings on all hosts: the order of node ranks
    current_host: str
    job_name: str  # the same on every host, never empty
    num_gpus: int  # of this host, without those hidden by CUDA_VISIBLE_DEVICES
    num_neurons: int  # Neuron cores of this host
    network_interface_name: str  # "" if SageMaker names none
    addresses: Mapping[str, str] = {}  # of hosts whose names must not be looked up
    # GPUs and MIG slices, if there are any slices: CUDA shows a process only one slice.
    mig: int = 0
    gpu_models: tuple[str, ...] = ()  # each once, as far as known
    is_described: bool = True  # by SageMaker; otherwise this host is alone

    @property
    def nnodes(self) -> int:
        """The number of hosts."""
        return len(self.hosts)

    @property
    def node_rank(self) -> int:
        """This host's place in the sorted list."""
        return self.hosts.index(self.current_host)

    @property
    def devices(self) -> str:
        """The devices of this host's ranks, in words."""
        if self.num_gpus:
            models = f" ({' and '.join(self.gpu_models)})" if self.gpu_models else ""
            return plural(self.num_gpus, "MIG slice" if self.mig else "GPU") + models
        return plural(self.num_neurons, "Neuron core") if self.num_neurons else "CPU"

    def address(self, host: str) -> str:
        """Return the name or address with which to look up a host."""
        return self.addresses.get(host, host)


class LaunchPlan(NamedTuple):
    """One host's share of the job, ready to be started.

    `nproc_per_node` is torchrun's argument ("2", or the value of PET_NPROC_PER_NODE);
    `environment` holds only the variables that are added to the launcher's own. A host that cannot
    start has an empty plan.
    """

    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    nproc_per_node: str = ""
    remark: str = ""  # a line for the log about surprises for the user
    reasons: str = ""  # the variables set for speed, and why
    fingerprint: Mapping[str, Any] = {}  # texts, or lists of them, that must agree; by their names
    runner: str = ""  # the program in front of torchrun, which runs it: neuron_parallel_compile
    warm: bool = False  # whether ranks are forked from a process that has imported torch
    tees: bool = False  # torchrun writes the ranks' output (--tee, --redirects, --logs-specs)
    master_addr: str = ""  # the ranks' MASTER_ADDR; "": torchrun's
    program: str = ""  # the program and its versions

    @property
    def python(self) -> str:
        """The interpreter of the ranks' stubs."""
        return self.argv[self.argv.index("--") + 1]


class Job(NamedTuple):
    """The hosts, the final options, and this host's plan.

    If there is an `error`, this host cannot start; the other hosts are told.
    """

    cluster: Cluster
    options: Options
    plan: LaunchPlan = LaunchPlan()
    error: Exception | None = None

    @property
    def current_host(self) -> str:
        """The name of this host."""
        return self.cluster.current_host

    @property
    def has_peers(self) -> bool:
        """Whether launchers of several hosts communicate."""
        return self.cluster.nnodes > 1 and not self.options.dry_run

    @property
    def coordinator(self) -> str:
        """The host that decides for all."""
        return self.cluster.hosts[0] if self.has_peers else self.current_host

    @property
    def coordinates(self) -> bool:
        """Whether this host decides for all."""
        return self.coordinator == self.current_host

    @property
    def members(self) -> tuple[str, ...]:
        """The other hosts that talk to the coordinator."""
        return self.cluster.hosts[1:] if self.has_peers else ()

    @property
    def restart_timeout(self) -> int:
        """How many seconds a restart may wait for hosts to clear, and to find each other again."""
        return self.options.restart_timeout or self.options.start_timeout

    @property
    def endpoint(self) -> str:
        """Where the torchruns of all hosts meet, on the first host, by its name."""
        return self.endpoint_at(self.cluster.hosts[0])

    def endpoint_at(self, host: str) -> str:
        """Return where the torchruns meet, if `host` resolves to the first host."""
        if self.cluster.nnodes > 1:
            name = f"[{host}]" if ":" in host else host  # an IPv6 address
            return f"{name}:{self.options.rdzv_port}"
        return "localhost:0"  # a free port of torchrun's own, so that jobs here do not collide

    def taken_port(self) -> str:
        """Return the message for a first host where the port of torchrun's store is taken."""
        taken = f"the rendezvous port of {self.endpoint} is already in use on this host"
        return f"{taken}; {other_port('rdzv_port')}"

    def lines(self) -> tuple[str, ...]:
        """Return the log lines of the plan: one or two, and one for surprises."""
        if self.error:
            return ()
        runs = "runs" if self.plan.nproc_per_node == "1" else "run"
        first = f"{self.summary()} {runs} {self.plan.program}."
        others = "; ".join(filter(None, [self._others(), self.plan.reasons]))
        return tuple(filter(None, [first, others and f"{others}.", self.plan.remark]))

    def summary(self) -> str:
        """Return this host's name, and its ranks and devices."""
        cluster, nproc = self.cluster, self.plan.nproc_per_node
        who = f"{cluster.current_host} has node_rank {cluster.node_rank} (nnodes={cluster.nnodes})"
        who += f" in job {cluster.job_name}"
        if not cluster.is_described:
            why = "found neither SM_HOSTS nor SageMaker's config files"
            who = f"{cluster.current_host} is alone ({why})"
        ranks = plural(nproc, "rank")
        if not nproc.isdecimal():
            ranks = f"ranks counted by torchrun (--nproc-per-node={nproc})"
        return f"{who}: {ranks} on {cluster.devices}"

    def _others(self) -> str:
        """Return the other hosts, and where all meet; "" for a single host."""
        cluster = self.cluster
        if cluster.nnodes == 1:
            return ""
        hosts, port = listed(cluster.hosts), self.options.peer_port
        return f"{hosts}: rendezvous at {self.endpoint}, launcher channel on port {port}"
