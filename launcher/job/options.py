"""The launcher's options: one table, whose rows are the fields of the value that holds them all.

Every `--launcher-NAME` can also be set by the variable `LAUNCHER_NAME`, for an estimator's
`environment=`. arguments.py reads both, help.py and docs/tables.py print the table.
"""

# Without `from __future__ import annotations`: the table is read from the annotations.

import math
from typing import Annotated, Any, Callable, NamedTuple, Optional

from launcher.text.words import PREFIX

# Internal variables, not options. For what a job runs (run/): the folder of the launcher's socket,
# and what tells its processes from others.
RUN_DIR = "LAUNCHER_RUN_DIR"
JOB_MARK = "LAUNCHER_JOB_MARK"
# For launchers below an init (presence.py): its socket.
INIT = "LAUNCHER_INIT"
# From `sm-launch local`: a JSON object of the hosts' addresses, as their names do not resolve.
HOST_ADDRESSES = "LAUNCHER_HOST_ADDRESSES"
# And the folder DIR of each host's DIR/HOST/events.jsonl, whatever --launcher-log-dir names.
EVENTS_DIR = "LAUNCHER_EVENTS_DIR"
INTERNAL = (RUN_DIR, JOB_MARK, INIT, HOST_ADDRESSES, EVENTS_DIR)
SWITCHES = {"true": True, "false": False}


# Parsers of one value each; they raise ValueError, which says what was expected.


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from minimum to maximum."""

    def parse(text: str) -> int:
        # isdecimal() alone accepts other scripts' digits; int() alone accepts "1_0" and " 1".
        if text.isascii() and text.isdecimal() and len(text) < 10:
            if minimum <= int(text) <= maximum:
                return int(text)
        raise ValueError(f"a whole number from {minimum} to {maximum}")

    return parse


RANKS = whole(1, 1024)  # of one host
COUNTED = ("auto", "cpu", "gpu", "xpu")  # what torchrun counts for --nproc-per-node


def _or_never(text: str) -> float:
    return _SECONDS(text) or math.inf


def _or_auto(parse: Callable[[str], int]) -> Callable[[str], Optional[int]]:
    """Return a parser that takes the word for what the launcher works out, None, as well."""

    def parse_or_auto(text: str) -> Optional[int]:
        if text == "auto":
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"auto, or {error}") from None

    return parse_or_auto


def switch(text: str) -> bool:
    """Return what `true` or `false` stands for, in any case of letters."""
    if text.lower() not in SWITCHES:
        raise ValueError("true or false")
    return SWITCHES[text.lower()]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("names separated by commas")
    return names


def _bools(text: str) -> str:
    if text not in ("as-is", "flag"):
        raise ValueError("as-is or flag")
    return text


def _start(text: str) -> str:
    if text not in ("cold", "warm"):
        raise ValueError("cold or warm")
    return text


def _torchrun_args(text: str) -> tuple[str, ...]:
    import shlex  # 6 ms of CPU that most jobs need not spend

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"torchrun arguments quoted as in a shell ({error})") from None
    if words and not words[0].startswith("-"):
        raise ValueError("torchrun options, which start with a dash")
    for word in words:
        for option, instead in _SET_BY_LAUNCHER.items():
            if names(word, option):
                raise ValueError(f"torchrun options other than {option} ({instead})")
    return tuple(words)


# torchrun's options that the launcher sets: what is executed, and what has an option here.
_SET_BY_LAUNCHER = {
    **dict.fromkeys(("--", "-m", "--module", "--no-python", "--run-path"), "see --train-module"),
    **{
        f"--{name}": f"use {PREFIX}{name}" for name in ("nproc-per-node", "max-restarts", "log-dir")
    },
    "--shutdown-timeout": f"use {PREFIX}grace",
    "--nnodes": f"the job uses all hosts, or those of {PREFIX}instance-groups",
}


def names(word: str, option: str) -> bool:
    """Tell whether torchrun may take a word for this option of its own.

    It takes `_` for `-`, and abbreviations; it refuses an ambiguous one itself.
    """
    name = word.partition("=")[0].replace("_", "-")
    if name[:2] == "--" and name != "--":
        return option.startswith(name)
    return name[:2] == option  # "-mr3" is "-m -r 3"


class Option(NamedTuple):
    """One `--launcher-NAME`: how its value is parsed, and what `--help` says about it."""

    group: str
    metavar: str
    parse: Callable[[str], Any]
    help: str


_SIZE, _MEET, _END = "Job size", "Connecting the hosts", "Stops and failures"
_HANG = "Hangs"
_STARTS = "Starting ranks"
_REACH = "torchrun and the script"
_SAYS = "Launcher output"
_PORT, _SECONDS = whole(1, 65535), whole(0, 86400)


class Options(NamedTuple):
    """The launcher's options, validated; times are in seconds. docs/options.md explains them.

    A field with an `Option` is a `--launcher-NAME`: a new option is a row here.
    """

    nproc_per_node: Annotated[
        Optional[int],  # None: auto
        Option(
            _SIZE,
            "auto|N",
            _or_auto(RANKS),
            "processes per host; auto: one per GPU, else one per Neuron core, else 1",
        ),
    ] = None
    instance_groups: Annotated[
        tuple[str, ...],  # (): all
        Option(
            _SIZE, "A,B", _names, ("instance groups that run the job, in a heterogeneous cluster")
        ),
    ] = ()
    max_restarts: Annotated[
        int,
        Option(
            _SIZE, "N", whole(0, 1000), ("how many times to restart all ranks after a rank fails")
        ),
    ] = 0
    rdzv_port: Annotated[
        int,
        Option(
            _MEET,
            "PORT",
            _PORT,
            "port of torchrun's rendezvous (the c10d store) on the first host",
        ),
    ] = 29400
    peer_port: Annotated[
        int, Option(_MEET, "PORT", _PORT, "port of the launcher channel on the first host")
    ] = 29401
    start_timeout: Annotated[
        int,
        Option(
            _MEET,
            "SECONDS",
            whole(1, 86400),
            "fail the job if not all hosts have joined after this many seconds",
        ),
    ] = 900
    restart_timeout: Annotated[
        Optional[int],  # None: start_timeout
        Option(
            _MEET,
            "SECONDS",
            _or_auto(whole(1, 86400)),
            "fail the job if a restart has not completed its rendezvous after this many "
            "seconds; auto: same as --launcher-start-timeout",
        ),
    ] = None
    host_timeout: Annotated[
        int,
        Option(
            _MEET,
            "SECONDS",
            whole(5, 3600),
            "how long a host may be unreachable over the network before it counts as lost",
        ),
    ] = 14
    grace: Annotated[
        int,
        Option(
            _END,
            "SECONDS",
            _SECONDS,
            "how long ranks, and processes they started, have between a stop (SIGTERM) and SIGKILL",
        ),
    ] = 100
    failure_grace: Annotated[
        int,
        Option(
            _END,
            "SECONDS",
            _SECONDS,
            "how long ranks, and processes they left behind, may take to exit after a failure or "
            "before a restart; then SIGKILL",
        ),
    ] = 10
    watch: Annotated[
        int,
        Option(
            _HANG,
            "SECONDS",
            _SECONDS,
            "how often to check each rank's progress through its collectives; 0: never",
        ),
    ] = 15
    hang_notify: Annotated[
        int,
        Option(
            _HANG,
            "SECONDS",
            whole(1, 86400),
            "after this many seconds without progress, log which rank the others are waiting "
            "for, or which rank's process is still running though its script has ended",
        ),
    ] = 60
    hang_timeout: Annotated[
        float,  # infinite: never
        Option(
            _HANG,
            "SECONDS",
            _or_never,
            "fail the attempt after this many seconds without progress (plus up to two "
            "intervals of --launcher-watch, and 3 s); set it above your longest evaluation or "
            "save; 0: never",
        ),
    ] = math.inf
    bools: Annotated[
        str,
        Option(
            _REACH,
            "as-is|flag",
            _bools,
            "how to pass booleans, such as SageMaker's `--amp True`, to the script; as-is: "
            "unchanged; flag: `--amp`, or nothing for false",
        ),
    ] = "as-is"
    start: Annotated[
        str,
        Option(
            _STARTS,
            "cold|warm",
            _start,
            "cold: each rank imports torch; warm: ranks are forked from a process on their "
            "host that has already imported it",
        ),
    ] = "cold"
    preload: Annotated[
        tuple[str, ...],  # ()
        Option(
            _STARTS,
            "A,B",
            _names,
            "with a warm start: modules to import before forking, besides torch",
        ),
    ] = ()
    torchrun_args: Annotated[
        tuple[str, ...],
        Option(
            _REACH,
            "ARGS",
            _torchrun_args,
            "additional torchrun arguments, as one shell-quoted string",
        ),
    ] = ()
    script_dir: Annotated[
        str,
        Option(
            _REACH,
            "DIR",
            str,
            "where else to look for the file of --train-script: a folder in the image",
        ),
    ] = ""
    smddp_compat: Annotated[
        bool,
        Option(
            _REACH,
            "true|false",
            switch,
            "provide an open-source smdistributed.dataparallel if AWS's is not installed",
        ),
    ] = False
    log_dir: Annotated[
        str,
        Option(
            _SAYS,
            "DIR",
            str,
            "keep each rank's output in DIR/HOST/attempt-N/rank-R.log, and the events in "
            "DIR/HOST/events.jsonl",
        ),
    ] = ""
    log_prefix: Annotated[
        bool,
        Option(
            _SAYS,
            "true|false",
            switch,
            "start each line of a rank's output in the job's log with `[rank R] `",
        ),
    ] = False
    verbose: Annotated[
        bool,
        Option(_SAYS, "true|false", switch, "log every decision, with seconds since the start"),
    ] = False
    dry_run: Annotated[
        bool,
        Option(
            _SAYS,
            "",
            switch,
            "print the command and the environment variables added, without starting anything",
        ),
    ] = False

    # What is not a --launcher-NAME.
    train_script: str = ""
    train_module: str = ""
    script_args: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()  # the fields that the user set; they win over PET_...
    unknown_twins: tuple[str, ...] = ()  # variables like LAUNCHER_..., without an option
    folder: str = ""  # where ranks run, "" for the current folder; target.py finds it


OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0]
    for name, hint in Options.__annotations__.items()
    if hasattr(hint, "__metadata__")
}
