"""What was seen on a host, as values. Pure; look.py fills them in.

Every field has a default that stands for "not known": nothing is found wrong with it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

LOG_DIR = "--launcher-log-dir"  # what a folder is used for


class JobFacts(NamedTuple):
    """What the launcher would run here; `error` is why it would not start."""

    error: str = ""
    names_script: bool = True
    takes_part: bool = True
    hosts: tuple[str, ...] = ()  # in the order of node ranks; (): not known
    current_host: str = ""
    nproc_per_node: str = ""  # a number, or torchrun's word for it
    num_gpus: int = 0
    num_neurons: int = 0
    peers: bool = True
    start_timeout: int = 900
    grace: int = 100
    failure_grace: int = 10
    network_interface_name: str = ""  # the one that SageMaker names
    chosen_interfaces: Mapping[str, str] = {}  # NCCL_ and GLOO_SOCKET_IFNAME of the plan
    users_interfaces: Mapping[str, str] = {}  # the same two, set by the user
    summary: str = ""
    said: tuple[str, ...] = ()  # what the launcher would log: what was set, and why
    pet: tuple[str, ...] = ()  # PET_ variables
    unknown: tuple[str, ...] = ()  # LAUNCHER_ variables that are no options
    distribution: tuple[str, ...] = ()  # what the estimator's distribution= has switched on
    on_sagemaker: bool = False  # its variables or its config files are here

    @property
    def nnodes(self) -> int:
        """The number of hosts."""
        return len(self.hosts)

    @property
    def is_first(self) -> bool:
        """Whether the other hosts meet at this one."""
        return self.hosts[:1] == (self.current_host,)

    @property
    def processes(self) -> int:
        """The number of ranks of this host; torchrun's words stand for its GPUs, at least one."""
        return int(self.nproc_per_node) if self.nproc_per_node.isdecimal() else self.num_gpus or 1


class Name(NamedTuple):
    """A host's name: its addresses, None if no answer came in time."""

    host: str
    addresses: tuple[str, ...] | None
    is_given: bool = False  # a made-up host's address, which nobody looks up

    @property
    def is_address(self) -> bool:
        """Whether no name has to resolve."""
        return self.is_given or self.addresses == (self.host,)


class PortState(enum.Enum):
    """What was seen of a port of the first host: there, and from another host."""

    FREE = "free"
    TAKEN = "taken"
    DENIED = "denied"
    ANSWERS = "answers"
    REFUSES = "refuses"
    SILENT = "silent"


class Port(NamedTuple):
    """A port on the first host; `option` is what sets it."""

    number: int
    option: str
    state: PortState


class NetworkFacts(NamedTuple):
    """Names, interfaces and ports."""

    names: tuple[Name, ...] = ()
    seconds: float = 0  # that a look-up was given
    interfaces: Mapping[str, tuple[str, ...]] = {}  # name: addresses
    ports: tuple[Port, ...] = ()
    efa: bool = False
    efa_plugin: str = ""  # NCCL's plugin for it, if one was found
    locked_memory: int | None = None  # soft limit in bytes; None: no limit


class DeviceFacts(NamedTuple):
    """GPUs as the driver's own tool sees them. `problem`: why it did not say."""

    gpus: tuple[str, ...] = ()  # their names
    driver: str = ""
    problem: str = ""
    is_seen: bool = True  # a GPU, by the kernel: on its bus, or as a device file


class TorchFacts(NamedTuple):
    """What a child process found when it imported torch. `problem`: why it could not."""

    version: str = ""
    missing: bool = False
    problem: str = ""
    was_started: bool = True  # the child process
    is_late: bool = False  # the problem is that it took too long
    distributed: bool = True
    backends: tuple[str, ...] = ()
    cuda: str = ""  # that it was built for, "" for a CPU build
    devices: int | None = None  # that CUDA found; None: did not answer
    cuda_problem: str = ""
    nccl: str = ""
    refused: str = ""  # why torchrun would not take the arguments that a user has for it


class Folder(NamedTuple):
    """A folder that a job writes to. `problem`: why it cannot."""

    path: str
    use: str
    problem: str = ""
    free: int | None = None  # bytes
    no_inodes: bool = False


class Limit(NamedTuple):
    """A limit, and how much of it is used; None: unlimited, or not known."""

    most: int | None = None
    used: int | None = None


class MachineFacts(NamedTuple):
    """Memory, folders and limits of this host."""

    cores: int = 1
    shm: Limit = Limit()  # /dev/shm, in bytes; 0: it is missing or read-only
    folders: tuple[Folder, ...] = ()
    open_files: tuple[int | None, int | None] = (None, None)  # soft, hard
    processes: Limit = Limit()  # of the cgroup, or of this user
    memory: Limit = Limit()  # of the cgroup or the machine, in bytes
    memory_of: str = ""  # which of both


class StopFacts(NamedTuple):
    """What stands between a stop and the launcher, which would be where this process is."""

    own_pid: int = 0
    pid_1: tuple[str, ...] = ()  # its arguments; (): cannot be seen
    ancestors: tuple[tuple[int, tuple[str, ...]], ...] = ()  # pid and arguments, the parent first
    init_answers: bool = False  # `sm-launch init` runs above


class Versions(NamedTuple):
    """Versions of what is not torch's; "" for what is not installed."""

    launcher: str = ""
    python: str = ""
    psutil: str = ""
    toolkit: str = ""


class Facts(NamedTuple):
    """All that was seen on one host."""

    job: JobFacts = JobFacts()
    network: NetworkFacts = NetworkFacts()
    devices: DeviceFacts = DeviceFacts()
    torch: TorchFacts = TorchFacts()
    machine: MachineFacts = MachineFacts()
    stop: StopFacts = StopFacts()
    versions: Versions = Versions()
    late: tuple[str, ...] = ()  # what was not seen in time: "network", "machine"
