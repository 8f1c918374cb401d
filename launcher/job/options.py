"""The launcher's options: one table, whose rows are the fields of the value that holds them all.

Every `--launcher-NAME` can also be set by the variable `LAUNCHER_NAME`, for an estimator's
`environment=`. arguments.py reads both, help.py and docs/tables.py print the table.
"""

# Without `from __future__ import annotations`: the table is read from the annotations.

import math
from typing import Annotated, Any, Callable, NamedTuple, Optional

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
_PORT = whole(1, 65535)
_SECONDS, _SOME_SECONDS = whole(0, 86400), whole(1, 86400)
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


def _one_of(*words: str) -> Callable[[str], str]:
    """Return a parser of one of some words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(" or ".join(words))
        return text

    return parse


def _torchrun_args(text: str) -> tuple[str, ...]:
    import shlex  # 6 ms of CPU that most jobs need not spend

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"torchrun arguments quoted as in a shell ({error})") from None
    return tuple(words)


class Option(NamedTuple):
    """One `--launcher-NAME`: how its value is parsed, and what `--help` says about it."""

    group: str
    metavar: str
    help: str
    parse: Callable[[str], Any]


class Options(NamedTuple):
    """The launcher's options, validated; times are in seconds. docs/options.md explains them.

    A field with a parser is a `--launcher-NAME`: a new option is a field here, and a row of _HELP.
    """

    nproc_per_node: Annotated[Optional[int], _or_auto(RANKS)] = None  # None: auto
    instance_groups: Annotated[tuple[str, ...], _names] = ()  # (): all
    max_restarts: Annotated[int, whole(0, 1000)] = 0
    rdzv_port: Annotated[int, _PORT] = 29400
    peer_port: Annotated[int, _PORT] = 29401
    start_timeout: Annotated[int, _SOME_SECONDS] = 900
    restart_timeout: Annotated[Optional[int], _or_auto(_SOME_SECONDS)] = None  # None: start_timeout
    host_timeout: Annotated[int, whole(5, 3600)] = 14
    grace: Annotated[int, _SECONDS] = 100
    failure_grace: Annotated[int, _SECONDS] = 10
    watch: Annotated[int, _SECONDS] = 15
    hang_notify: Annotated[int, _SOME_SECONDS] = 60
    hang_timeout: Annotated[float, _or_never] = math.inf
    bools: Annotated[str, _one_of("as-is", "flag")] = "as-is"
    start: Annotated[str, _one_of("cold", "warm")] = "cold"
    preload: Annotated[tuple[str, ...], _names] = ()
    torchrun_args: Annotated[tuple[str, ...], _torchrun_args] = ()
    script_dir: Annotated[str, str] = ""
    smddp_compat: Annotated[bool, switch] = False
    log_dir: Annotated[str, str] = ""
    log_prefix: Annotated[bool, switch] = False
    verbose: Annotated[bool, switch] = False
    dry_run: Annotated[bool, switch] = False

    # What is not a --launcher-NAME.
    train_script: str = ""
    train_module: str = ""
    script_args: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()  # the fields that the user set; they win over PET_...
    unknown_twins: tuple[str, ...] = ()  # variables like LAUNCHER_..., without an option
    folder: str = ""  # where ranks run, "" for the current folder; target.py finds it


# For each group its options: the field, its value ("-" for a switch without one), what it means.
_HELP = """\
Job size
  nproc_per_node auto|N processes per host; auto: one per GPU, else one per Neuron core, else 1
  instance_groups A,B instance groups that run the job, in a heterogeneous cluster
  max_restarts N how many times to restart all ranks after a rank fails
Connecting the hosts
  rdzv_port PORT port of torchrun's rendezvous (the c10d store) on the first host
  peer_port PORT port of the launcher channel on the first host
  start_timeout SECONDS fail the job if not all hosts have joined after this many seconds
  restart_timeout SECONDS fail the job if hosts have not ended a failed attempt this many seconds
    after the decision to restart; auto: same as --launcher-start-timeout
  host_timeout SECONDS how long a host may be unreachable over the network before it counts as
    lost
Stops and failures
  grace SECONDS how long ranks, and processes they started, have between a stop (SIGTERM) and
    SIGKILL
  failure_grace SECONDS how long ranks, and processes they left behind, may take to exit after a
    failure or before a restart; then SIGKILL
Hangs
  watch SECONDS how often to check each rank's progress through its collectives; 0: never
  hang_notify SECONDS after this many seconds without progress, log which rank the others are
    waiting for, or which rank's process is still running though its script has ended
  hang_timeout SECONDS fail the attempt after this many seconds without progress (plus up to two
    intervals of --launcher-watch, and 3 s); set it above your longest evaluation or save; 0:
    never
torchrun and the script
  bools as-is|flag how to pass booleans, such as SageMaker's `--amp True`, to the script; as-is:
    unchanged; flag: `--amp`, or nothing for false
  torchrun_args ARGS additional torchrun arguments, as one shell-quoted string
  script_dir DIR where else to look for the file of --train-script: a folder in the image
  smddp_compat true|false provide an open-source smdistributed.dataparallel if AWS's is not
    installed
Starting ranks
  start cold|warm cold: each rank imports torch; warm: ranks are forked from a process on their
    host that has already imported it
  preload A,B with a warm start: modules to import before forking, besides torch
Launcher output
  log_dir DIR keep each rank's output in DIR/HOST/attempt-N/rank-R.log, and the events in
    DIR/HOST/events.jsonl
  log_prefix true|false start each line of a rank's output in the job's log with `[rank R] `
  verbose true|false log every decision, with seconds since the start
  dry_run - print the command and the environment variables added, without starting anything
"""


def _options() -> dict[str, Option]:
    """Return the options by their fields, in the order of _HELP."""
    options: dict[str, Option] = {}
    group = name = ""
    for line in _HELP.splitlines():
        if not line.startswith(" "):
            group = line
        elif line.startswith("    "):
            options[name] = options[name]._replace(help=f"{options[name].help} {line.strip()}")
        else:
            name, metavar, text = line.split(None, 2)
            (parse,) = Options.__annotations__[name].__metadata__
            options[name] = Option(group, metavar.strip("-"), text, parse)
    return options


OPTIONS = _options()
