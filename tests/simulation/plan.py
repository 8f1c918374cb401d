"""What is to happen in one simulated job: its size, its script, and what goes wrong when.

A plan and nothing else decides what happens: `seed` is where all delays come from. The repr() of a
plan replays its job (see __main__.py). Times are in seconds since the first launcher's start.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Word(enum.Enum):
    """A choice, whose repr() is what a plan is written with."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class AtStop(Word):
    """What the script does when its own process hears a stop."""

    SAVES = "saves"  # for `save` seconds, then ends with `save_code`
    DIES = "dies"  # it has no handler
    IGNORES = "ignores"
    FAILS = "fails"  # it raises while it saves


class AtBreak(Word):
    """What the script does when another rank's end has broken the connection to it."""

    RAISES = "raises"  # an exception that says so
    WAITS = "waits"  # for ever, as in NCCL without a watchdog
    EXITS = "exits"  # it catches that one, and calls sys.exit(1)
    ABORTS = "aborts"  # as NCCL's watchdog has it
    GOES_ON = "goes on"  # it is in no collective


class Script(NamedTuple):
    """What every rank runs."""

    seconds: float = 10.0  # of training
    at_stop: AtStop = AtStop.SAVES
    save: float = 0.5
    save_code: int = 0
    at_break: AtBreak = AtBreak.RAISES
    upload: float = 0.0  # how long a process goes on that each rank has started; 0: there is none
    upload_ignores: bool = False  # SIGTERM
    is_python: bool = True  # or it tells the launcher nothing, and has its handlers at once


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
    HALF_OPEN = "a connection is half open"  # the host alone is told
    DELAY = "a host's messages take long"  # `amount` each
    STOPS_READING = "a host stops reading"  # until its connection is given up
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
    TOO_FEW_FILES = "the first host can have too few files open"
    NO_TORCHRUN = "a host cannot execute torchrun"
    NO_FOLDER = "a host can make no folder"  # for attempt `amount`
    # Others on the first host's port.
    STRANGER = "a stranger connects"  # `amount` chooses what it says


class Fault(NamedTuple):
    """One thing that goes wrong."""

    what: What
    at: float = 0.0
    host: int = 0  # its number, 0 the first
    local_rank: int = 0
    amount: float = 0.0


class Plan(NamedTuple):
    """One job. Of the times, `grace` is for a stop and `failure_grace` for a failure."""

    hosts: int = 2
    nproc: int = 1  # ranks of each host
    script: Script = Script()
    max_restarts: int = 0
    grace: float = 10.0
    failure_grace: float = 4.0
    start_timeout: float = 60.0
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    runner: float | None = None  # seconds of own work of a program that runs torchrun, if one does
    watch: float = 0.0  # seconds between two looks at how far ranks are; 0: none
    hang_timeout: float = 0.0  # --launcher-hang-timeout in seconds; 0: none

    def names(self) -> tuple[str, ...]:
        """Return the hosts' names, sorted as SageMaker's are."""
        return tuple(f"algo-{number:04}" for number in range(1, self.hosts + 1))


def written(value: Any) -> str:
    """Return the Python that makes a plan, without what is as it is by default."""
    if not isinstance(value, (Plan, Script, Fault)):
        if isinstance(value, tuple):
            return "(" + "".join(f"{written(one)}, " for one in value) + ")"
        return repr(value)
    default = value._field_defaults
    fields = [
        f"{name}={written(field)}"
        for name, field in value._asdict().items()
        if name not in default or field != default[name]
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


def read(text: str) -> Plan:
    """Return the plan that `written` has made a text of."""
    names = {one.__name__: one for one in (Plan, Script, Fault, What, AtStop, AtBreak)}
    plan = eval(text, {"__builtins__": {}}, names)  # what a person types, or a test has printed
    assert isinstance(plan, Plan)
    return plan
