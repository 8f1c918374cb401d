"""What can go wrong in a simulated job, and of which kind that is."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Word(enum.Enum):
    """A choice, whose repr() is what a plan is written with."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class What(Word):
    """What goes wrong; `amount` of a fault is in seconds if not said otherwise."""

    # A rank.
    RAISES = "a rank raises"  # after it has cleaned up for `amount`
    EXITS = "a rank exits"  # sys.exit(3)
    ENDS = "a rank ends"  # os._exit(42)
    KILLED = "a rank is killed"
    CRASHES = "a rank crashes"  # SIGSEGV
    HOOK = "a rank's hook chooses its exit code"  # 42, `amount` after it has raised
    FORGIVEN = "a rank's hook ends it with 0"  # `amount` after it has raised
    LINGERS = "a rank lingers"  # for `amount` after it has raised, whatever it hears
    GPU_FAILS = "a rank's GPU fails"  # with an uncorrectable ECC error, as the rank says
    HANGS = "a rank hangs"
    LEAVES = "a rank leaves the others"  # sys.exit(0); its process ends `amount` after that
    # A process that the kernel holds: no signal reaches it for `amount`, or for ever if that is 0.
    STUCK = "a rank is stuck in the kernel"
    LEFT_STUCK = "what a rank has started is stuck in the kernel"
    TORCHRUN_STUCK = "torchrun is stuck in the kernel"
    # Torchrun.
    TORCHRUN_KILLED = "torchrun is killed"
    TORCHRUN_HANGS = "torchrun hangs"
    TORCHRUN_TOLD = "somebody sends torchrun SIGTERM"
    TORCHRUN_FAILS = "torchrun fails"  # its port is taken, for one
    # What stands for a rank, or makes their stores (if the job may restart).
    KEEPER_KILLED = "a rank's keeper is killed"
    KEEPER_HANGS = "a rank's keeper hangs"
    STUB_KILLED = "what torchrun has started for a rank is killed"
    STORE_KILLED = "what makes the ranks' stores is killed"
    STORE_FAILS = "no store can be made for ranks"
    STORE_SLOW = "the ranks' stores are made slowly"  # by `amount`
    # The program that runs torchrun, if the plan has one.
    RUNNER_KILLED = "torchrun's runner is killed"
    RUNNER_FAILS = "torchrun's runner fails"  # 3, at its end
    # A launcher, or its whole host.
    LAUNCHER_KILLED = "a launcher is killed"
    LAUNCHER_PAUSES = "a launcher stands still"  # for `amount`
    LAUNCHER_STOPS = "a launcher is stopped, and goes on much later"  # after `amount`
    LAUNCHER_FAILS = "a launcher meets an error of its own"
    HOST_KILLED = "a host is killed"  # its container: the kernel resets its connections
    HOST_VANISHES = "a host vanishes"  # its power: nobody is told
    HOST_LATE = "a host comes late"  # by `amount`
    HOST_ABSENT = "a host never comes"
    STARTS_SLOWLY = "a host's ranks start slowly"  # by up to `amount` at each step
    HOST_SLOW = "a host trains longer"  # by `amount`
    SAVES_LONGER = "a host's ranks save longer"  # by `amount`
    # The network.
    CUT = "a host is cut off"
    RESET = "a connection is lost"  # both ends are told
    DELAY = "a host's messages take long"  # `amount` each
    # People, and the platform.
    STOP = "a stop"
    STOP_ALL = "a stop of all hosts"
    CTRL_C = "Ctrl-C"
    CTRL_C_THRICE = "Ctrl-C three times"
    STACKS = "somebody asks where all ranks are"  # sm-launch stacks
    # Configuration.
    DIFFERS = "a host's script has other arguments"
    CANNOT_START = "a host cannot start"
    PORT_TAKEN = "the first host's port is taken"  # for `amount`
    NO_TORCHRUN = "a host cannot execute torchrun"
    NO_FOLDER = "a host can make no folder"  # for attempt `amount`


# Kinds of them.
AT_ONCE = (What.RAISES, What.EXITS, What.KILLED, What.ENDS, What.CRASHES)  # they need no time
FAILURES = (*AT_ONCE, What.HOOK, What.FORGIVEN, What.LINGERS, What.GPU_FAILS)  # of ranks
RANKS = (*FAILURES[:-1], What.HANGS, What.LEAVES)
HELD = (What.STUCK, What.LEFT_STUCK, What.TORCHRUN_STUCK)
KEEPERS = (What.KEEPER_KILLED, What.STUB_KILLED)
HANGS = (What.TORCHRUN_HANGS, What.TORCHRUN_STUCK, What.KEEPER_HANGS)
TORCHRUNS = (What.TORCHRUN_KILLED, What.TORCHRUN_TOLD, What.RUNNER_KILLED, *KEEPERS, *HANGS)
STORES = (What.STORE_FAILS, What.STORE_SLOW, What.STORE_KILLED)
STOPS = (What.STOP, What.STOP_ALL, What.CTRL_C, What.CTRL_C_THRICE)
HOSTS = (What.LAUNCHER_KILLED, What.HOST_KILLED, What.HOST_VANISHES, What.CUT, What.RESET)
LOSSES = (*HOSTS, What.LAUNCHER_STOPS)
PAUSES = (What.LAUNCHER_PAUSES, What.LAUNCHER_STOPS)
SLOW = (*PAUSES, What.DELAY)
MISCONFIGURED = (
    What.HOST_ABSENT, What.DIFFERS, What.CANNOT_START, What.PORT_TAKEN,
    What.NO_TORCHRUN, What.TORCHRUN_FAILS, What.RUNNER_FAILS, What.NO_FOLDER,
)  # fmt: skip
LASTING = (  # a host has them from its start
    What.HOST_LATE, What.HOST_SLOW, What.SAVES_LONGER, What.STARTS_SLOWLY, What.DELAY,
    What.STORE_FAILS, What.STORE_SLOW, *MISCONFIGURED,
)  # fmt: skip


class Fault(NamedTuple):
    """One thing that goes wrong."""

    what: What
    at: float = 0.0
    host: int = 0  # its number, 0 the first
    local_rank: int = 0
    amount: float = 0.0
