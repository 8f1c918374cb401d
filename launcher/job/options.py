"""The launcher's options: one table, whose rows are the fields of `Options`.

Every `--launcher-NAME` can also be set by the variable `LAUNCHER_NAME`, for an estimator's
`environment=`. arguments.py reads both, help.py and docs/tables.py print the table.
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable, NamedTuple, TypeVar

from launcher.errors import UnexpectedError

# Internal variables, not options; run/ has those for keepers and scripts.
# For processes of the job (run/): the folder of the launcher's socket, and a mark that tells them
# from others.
RUN_DIR = "LAUNCHER_RUN_DIR"
JOB_MARK = "LAUNCHER_JOB_MARK"
# For launchers below an init (presence.py): the init's socket.
INIT = "LAUNCHER_INIT"
# For the init: end with its command's exit code, whatever the launcher's is.
KEEP_EXIT_CODE = "LAUNCHER_KEEP_EXIT_CODE"
# From `sm-launch local`: a JSON object of the hosts' addresses, as their names do not resolve.
HOST_ADDRESSES = "LAUNCHER_HOST_ADDRESSES"
# From `sm-launch local`: the folder DIR of each host's DIR/HOST/events.jsonl, whatever
# --launcher-log-dir names.
EVENTS_DIR = "LAUNCHER_EVENTS_DIR"
# From `sm-launch local`: which of descriptors 1 and 2 are terminals; there it shows bars itself.
BARS = "LAUNCHER_BARS"
INTERNAL = (RUN_DIR, JOB_MARK, INIT, KEEP_EXIT_CODE, HOST_ADDRESSES, EVENTS_DIR, BARS)
SWITCHES = ("true", "false")
_T = TypeVar("_T")


# Parsers, each of one value; their ValueError says what was expected.


def whole(minimum: int, maximum: int, word: str = "", meaning: object = None) -> Any:
    """Return a parser of whole numbers from minimum to maximum, and of a word, if one is given."""

    def parse(text: str) -> Any:
        if word and text == word:
            return meaning
        # isdecimal() alone accepts other scripts' digits; int() alone accepts "1_0" and " 1".
        if text.isascii() and text.isdecimal() and len(text) < 10:
            if minimum <= int(text) <= maximum:
                return int(text)
        raise ValueError(f"{word and word + ', or '}a whole number from {minimum} to {maximum}")

    return parse


def checked(where: str, text: str, parse: Callable[[str], Any]) -> Any:
    """Return the parsed text. Raises LaunchError, which names `where` it was given."""
    try:
        return parse(text)
    except ValueError as error:
        raise UnexpectedError(where, text, str(error)) from None


MOST_RANKS, _DAY = 1024, 86400  # of one host; in seconds
_PORT, _SECONDS = whole(1, 65535), whole(0, _DAY)
COUNTED = ("auto", "cpu", "gpu", "xpu")  # devices that torchrun counts for --nproc-per-node


def _words(*words: str) -> Callable[[str], str]:
    """Return a parser of some words, in upper or lower case."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(" or ".join(words))
        return text.lower()

    return parse


def switch(text: str) -> bool:
    """Parse a switch."""
    return _words(*SWITCHES)(text) == SWITCHES[0]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("names separated by commas")
    return names


def _ranks(text: str) -> tuple[range, ...]:
    """Return ranges of the job's ranks, () for all."""
    parts = text.replace(" ", "").split(",")
    found = [re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII) for part in parts]
    ranges = tuple(range(int(ends[1]), int(ends[2] or ends[1]) + 1) for ends in found if ends)
    if text != "all" and not (all(found) and all(ranges)):
        raise ValueError("all, or ranks separated by commas, such as 0 or 0,8-15")
    return ranges


def _shell_words(text: str) -> tuple[str, ...]:
    import shlex  # 6 ms of CPU that most jobs need not spend

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"torchrun arguments quoted as in a shell ({error})") from None
    return tuple(words)


class Option(NamedTuple):
    """One `--launcher-NAME`: its value as `--help` shows it, how it is parsed, what it means."""

    metavar: str
    parse: Callable[[str], Any]
    help: str


_rows: list[Option] = []


def _option(default: _T, metavar: str, parse: Callable[[str], _T], meaning: str) -> _T:
    """Add a row to the table; return the default."""
    _rows.append(Option(metavar, parse, meaning))
    return default


class Options(NamedTuple):
    """The launcher's options, validated; times are in seconds. docs/options.md explains them.

    A new `--launcher-NAME` is a row here, in its group.
    """

    # fmt: off
    nproc_per_node: int | None = _option(None, "auto|N", whole(1, MOST_RANKS, "auto"),
        "processes per host; auto: one per GPU, else one per Neuron core, else 1")
    instance_groups: tuple[str, ...] = _option((), "A,B", _names,  # (): all
        "instance groups that run the job, in a heterogeneous cluster")
    max_restarts: int = _option(0, "N", whole(0, 1000),
        "how many times to restart all ranks after a rank fails")

    rdzv_port: int = _option(29400, "PORT", _PORT,
        "port of torchrun's rendezvous (the c10d store) on the first host")
    peer_port: int = _option(29401, "PORT", _PORT, "port of the launcher channel on the first host")
    start_timeout: int = _option(900, "SECONDS", whole(1, _DAY),
        "fail the job if not all hosts have joined, and started their ranks, within this many "
        "seconds")
    restart_timeout: int | None = _option(None, "SECONDS", whole(1, _DAY, "auto"),
        "fail the job if a restart waits longer than this for the failed attempt's end on all "
        "hosts; auto: same as --launcher-start-timeout")
    host_timeout: int = _option(14, "SECONDS", whole(5, 3600),
        "how long a host may be unreachable over the network before it counts as lost")

    grace: int = _option(100, "SECONDS", _SECONDS,
        "seconds from a stop (SIGTERM) to SIGKILL for ranks and their child processes")
    failure_grace: int = _option(10, "SECONDS", _SECONDS, "seconds for ranks, and processes "
        "they left behind, to exit after a failure or before a restart; then SIGKILL")

    watch: int = _option(15, "SECONDS", _SECONDS,
        "how often to check each rank's progress through its collectives; 0: never")
    hang_notify: float = _option(60, "SECONDS", whole(1, _DAY),
        "after this many seconds without progress (or --launcher-hang-timeout, if less), but not "
        "before --launcher-watch plus 3 s, log which rank the others wait for, or which rank's "
        "process still runs though its script has ended")
    hang_timeout: float = _option(math.inf, "SECONDS", whole(1, _DAY, "0", math.inf), "fail the "
        "attempt after this many seconds without progress (plus two or three intervals of "
        "--launcher-watch, and 3 s); set it above your longest evaluation or save; 0: never")
    notes: bool = _option(True, "true|false", switch,
        "log that ranks exchange nothing, form no group or stand still before their first "
        "collective, or what a job leaves for SageMaker to upload")

    bools: str = _option("as-is", "as-is|flag", _words("as-is", "flag"),
        "how to pass booleans, such as SageMaker's `--amp True`, to the script; as-is: unchanged; "
        "flag: `--amp`, or nothing for false")
    torchrun_args: tuple[str, ...] = _option((), "ARGS", _shell_words,
        "additional torchrun arguments, as one shell-quoted string")
    script_dir: str = _option("", "DIR", str,
        "where else to look for the file of --train-script: a folder in the image")
    smddp_compat: bool = _option(False, "true|false", switch,
        "provide an open-source smdistributed.dataparallel if AWS's is not installed")

    start: str = _option("cold", "cold|warm", _words("cold", "warm"),
        "cold: each rank imports torch; warm: ranks are forked from a process that has imported it")
    preload: tuple[str, ...] = _option((), "A,B", _names,
        "with a warm start: modules to import before forking, besides torch")

    log_dir: str = _option("", "DIR", str, "keep each rank's output in "
        "DIR/HOST/attempt-N/rank-R.log, and the events in DIR/HOST/events.jsonl")
    log_prefix: bool = _option(False, "true|false", switch,
        "start each line of a rank's output in the job's log with `[rank R] `")
    log_ranks: tuple[range, ...] = _option((), "all|R,R-R", _ranks,
        "ranks whose output the job's log shows (default: all); the files have every rank's")
    verbose: bool = _option(False, "true|false", switch,
        "log every decision, with seconds since the start")
    dry_run: bool = _option(False, "true|false", switch,
        "print the command and the environment variables added, without starting anything")
    # fmt: on

    # Fields that are not a --launcher-NAME.
    train_script: str = ""
    train_module: str = ""
    script_args: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()  # the fields that the user set; they win over PET_...
    folder: str = ""  # where ranks run, "" for the current folder; target.py finds it


OPTIONS: dict[str, Option] = dict(zip(Options._fields, _rows))
