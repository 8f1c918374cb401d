"""What people type: the launcher's options, apart from the training script's arguments.

`--train-script`, `--train-module` and everything that begins with `--launcher-` are the
launcher's, wherever they stand. All else reaches the script byte for byte, in order, which
is why this is no argparse: its abbreviations, its `--` and its sense of order would each
change somebody's hyperparameters.

Every `--launcher-NAME` has a twin `LAUNCHER_NAME` in the environment, for an estimator's
`environment=`. The command line wins over the twin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from launcher.errors import LaunchError

PREFIX = "--launcher-"
# Variables of the launcher's own, not options: supervise.py's for its children, and init.py's.
RUN_DIR = "LAUNCHER_RUN_DIR"
INIT = "LAUNCHER_INIT"
EXIT_BARRIER = "LAUNCHER_EXIT_BARRIER"
MASTER_ADDR = "LAUNCHER_MASTER_ADDR"
OWN = (RUN_DIR, INIT, EXIT_BARRIER, MASTER_ADDR)
_SWITCHES = {"true": True, "false": False}


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return a parser for whole numbers from minimum to maximum."""

    def parse(text: str) -> int:
        # isdecimal() alone accepts other scripts' digits; int() alone accepts "1_0" and " 1".
        if text.isascii() and text.isdecimal() and len(text) < 10:
            if minimum <= int(text) <= maximum:
                return int(text)
        raise ValueError(f"a whole number from {minimum} to {maximum}")

    return parse


def _nproc(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return whole(1, 1024)(text)
    except ValueError as error:
        raise ValueError(f"auto, or {error}") from None


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError("true or false")
    return _SWITCHES[text.lower()]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("names with commas between them")
    return names


def _bools(text: str) -> str:
    if text not in ("as-is", "flag"):
        raise ValueError("as-is or flag")
    return text


def _torchrun_args(text: str) -> tuple[str, ...]:
    import shlex  # 6 ms of CPU that most jobs need not spend

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"torchrun arguments quoted as in a shell ({error})") from None
    if words and not words[0].startswith("-"):
        raise ValueError("torchrun options, which begin with a dash")
    for word in words:
        for option, instead in _OURS.items():
            if names(word, option):
                raise ValueError(f"torchrun options other than {option} ({instead})")
    return tuple(words)


# torchrun's options that are the launcher's to say: what it executes, and what has an option here.
_OURS = {
    **dict.fromkeys(("--", "-m", "--module", "--no-python", "--run-path"), "see --train-module"),
    **{
        f"--{name}": f"use {PREFIX}{name}" for name in ("nproc-per-node", "max-restarts", "log-dir")
    },
    "--shutdown-timeout": f"use {PREFIX}grace",
    "--nnodes": f"all hosts take part, or those of {PREFIX}instance-groups",
}


def names(word: str, option: str) -> bool:
    """Tell whether torchrun may take a word for this option of its own.

    It takes `_` for `-`, and abbreviations; one that is ambiguous it refuses itself.
    """
    name = word.partition("=")[0].replace("_", "-")
    if name[:2] == "--" and name != "--":
        return option.startswith(name)
    return name[:2] == option  # "-mr3" is "-m -r 3"


class Option(NamedTuple):
    """One `--launcher-NAME`: how to read its value, and what `--help` says of it."""

    group: str
    metavar: str
    parse: Callable[[str], Any]  # raises ValueError, which says what was expected
    help: str


class Options(NamedTuple):
    """The launcher's options, validated; times are in seconds. README.md explains them.

    A NamedTuple, as all values of the launcher are: importing dataclasses takes 11 ms.
    """

    nproc_per_node: int | None = None  # None: auto
    instance_groups: tuple[str, ...] = ()  # (): all
    max_restarts: int = 0
    rdzv_port: int = 29400
    peer_port: int = 29401
    peers: bool = True
    start_timeout: int = 900
    grace: int = 100
    failure_grace: int = 10
    bools: str = "as-is"
    torchrun_args: tuple[str, ...] = ()
    script_dir: str = ""
    log_dir: str = ""
    dry_run: bool = False

    # What is not a --launcher-NAME.
    train_script: str = ""
    train_module: str = ""
    script_args: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()  # fields that the user set: those win over PET_...
    unknown_twins: tuple[str, ...] = ()  # LAUNCHER_... variables that are no option's


_SIZE, _MEET, _END = "Size of the job", "How hosts meet", "How a job ends"
_REACH = "What reaches torchrun and the script"
OPTIONS = {
    "nproc_per_node": Option(
        _SIZE, "auto|N", _nproc, "processes per host; auto: its GPUs, else Neuron cores, else 1"
    ),
    "instance_groups": Option(
        _SIZE, "A,B", _names, "instance groups that take part, in a heterogeneous cluster"
    ),
    "max_restarts": Option(_SIZE, "N", whole(0, 1000), "torchrun's restarts"),
    "rdzv_port": Option(_MEET, "PORT", whole(1, 65535), "port of the c10d store on the first host"),
    "peer_port": Option(
        _MEET,
        "PORT",
        whole(1, 65535),
        "port of the launchers' own channel on the first host",
    ),
    "peers": Option(
        _MEET, "true|false", _switch, "the channel between hosts; off: plain torchrun behaviour"
    ),
    "start_timeout": Option(
        _MEET, "SECONDS", whole(1, 86400), "how long hosts may be missing before the job fails"
    ),
    "grace": Option(
        _END,
        "SECONDS",
        whole(0, 86400),
        "from a stop (SIGTERM) to SIGKILL for the ranks and what they started",
    ),
    "failure_grace": Option(
        _END,
        "SECONDS",
        whole(0, 86400),
        "once a rank has failed, to SIGKILL: for that rank to end, and then for the others",
    ),
    "bools": Option(
        _REACH,
        "as-is|flag",
        _bools,
        "how SageMaker's `--flag True` reaches the script: as-is, or as `--flag` or nothing",
    ),
    "torchrun_args": Option(
        _REACH, "ARGS", _torchrun_args, "more torchrun arguments, as one shell-quoted string"
    ),
    "script_dir": Option(
        _REACH, "DIR", str, "where an image keeps scripts of its own; looked in last for the script"
    ),
    "log_dir": Option(_REACH, "DIR", str, "keep each rank's output there too (torchrun's log dir)"),
    "dry_run": Option(
        _REACH, "", _switch, "print the command and the environment it adds; start nothing"
    ),
}


def flag(name: str) -> str:
    """Return the spelling of a field's option: `rdzv_port` gives `--launcher-rdzv-port`."""
    return PREFIX + name.replace("_", "-")


def wants_help(argv: Sequence[str]) -> bool:
    """Tell whether these arguments ask the launcher, not the script, for help."""
    return list(argv) in (["--help"], ["-h"]) or PREFIX + "help" in argv


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Read the options from the command line and their twins in the environment.

    Raises LaunchError for an unknown option, a missing or unusable value, no script, and a
    script and a module both.
    """
    values: dict[str, Any] = {}
    twins = {"LAUNCHER_" + name.upper(): name for name in OPTIONS}
    unknown = []
    for variable, text in sorted(environ.items()):
        if variable in twins and text:
            values[twins[variable]] = _value(twins[variable], text, variable)
        elif variable.startswith("LAUNCHER_") and variable not in (*twins, *OWN):
            unknown.append(variable)

    target = {"--train-script": "", "--train-module": ""}
    script_args = []
    rest = list(reversed(argv))
    while rest:
        word = rest.pop()
        name, equals, text = word.partition("=")
        if name not in target and not name.startswith(PREFIX):
            script_args.append(word)
            continue
        field = "" if name in target else _field(name)
        if not equals and field and OPTIONS[field].parse is _switch:
            # SageMaker sends `--flag true`; people type `--flag`.
            text = rest.pop() if rest and rest[-1].lower() in _SWITCHES else "true"
        elif not equals:
            if not rest:
                raise LaunchError(f"{name} needs a value; see --launcher-help.")
            text = rest.pop()
        if field:
            values[field] = _value(field, text, name)
        elif not text:
            raise LaunchError(f"{name} is empty; expected the training script or module to run.")
        else:
            target[name] = text

    script, module = target["--train-script"], target["--train-module"]
    if script and module:
        raise LaunchError(
            f"--train-script {script} and --train-module {module} are both given; "
            "expected one of them."
        )
    if not script and not module:
        near = [word for word in script_args if word.startswith(("--train_", "--train-"))]
        near += [word for word in script_args[:1] if word.endswith(".py")]
        hint = f"{near[0]} is not how to say what to run, so " if near else ""
        raise LaunchError(
            f"{hint}there is nothing to run: give --train-script PATH or --train-module NAME "
            "(on SageMaker: the hyperparameter train-script); see --launcher-help."
        )
    if values.get("bools") == "flag":
        script_args = _as_flags(script_args)
    return Options(
        **values,
        train_script=script,
        train_module=module,
        script_args=tuple(script_args),
        given=frozenset(values),
        unknown_twins=tuple(unknown),
    )


def _field(name: str) -> str:
    """Return the field of the option called name, as it was typed."""
    fields = {flag(field): field for field in OPTIONS}
    if name in fields:
        return fields[name]
    import difflib  # only for a mistake

    known = [option[len(PREFIX) :] for option in fields]
    close = difflib.get_close_matches(name[len(PREFIX) :].replace("_", "-"), known, n=1)
    hint = f" Did you mean {PREFIX}{close[0]}?" if close else ""
    raise LaunchError(f"{name} is no option of the launcher.{hint} See --launcher-help.")


def _value(field: str, text: str, where: str) -> Any:
    try:
        return OPTIONS[field].parse(text)
    except ValueError as error:
        raise LaunchError(f"{where} is {text!r}; expected {error}.") from None


def _as_flags(args: Sequence[str]) -> list[str]:
    """Turn `--flag True` into `--flag`, and `--flag False` into nothing.

    SageMaker sends every hyperparameter as two tokens (sagemaker-python-sdk#4247).
    """
    out: list[str] = []
    for word in args:
        if out and out[-1].startswith("-") and word in ("True", "true"):
            continue
        if out and out[-1].startswith("-") and word in ("False", "false"):
            out.pop()
            continue
        out.append(word)
    return out


def help_text() -> str:
    """Return the whole of `--help`."""
    lines = [
        "usage: sm-launch (--train-script PATH | --train-module NAME)"
        " [--launcher-OPTION VALUE ...] [SCRIPT ARGUMENT ...]",
        "       sm-launch init [COMMAND [ARGUMENT ...]]",
        "",
        "Run one PyTorch training job on all hosts of a SageMaker cluster with torchrun.",
        "Whatever is not listed here reaches the script unchanged, in order.",
        "With `init`, be a container's PID 1: run COMMAND (SageMaker's is `train`), pass a stop on",
        "to the launcher below it. Without COMMAND, or if it begins with a dash, be the launcher.",
        "",
        "What to run (one of them):",
        "  --train-script PATH  run a Python file (or archive, or folder), as `python PATH` would",
        "  --train-module NAME  run a module, as `python -m NAME` would",
    ]
    for group in dict.fromkeys(option.group for option in OPTIONS.values()):
        lines += ["", group + ":"]
        for name, option in OPTIONS.items():
            if option.group == group:
                default = Options._field_defaults[name]
                silent = default is None or default is False or default in ((), "")
                shown = "" if silent else f" ({str(default).lower()})"
                lines += [
                    f"  {flag(name)} {option.metavar}".rstrip(),
                    f"      {option.help}{shown}",
                ]
    lines += [
        "",
        "  --launcher-help      this text; so is --help as the only argument",
        "",
        "Each option has a twin in the environment: LAUNCHER_GRACE=60 is --launcher-grace 60.",
        "torchrun's own PET_... variables win over what the launcher works out by itself.",
        "",
        "Exit codes: 0 every rank succeeded; the code of the first rank to fail, 128 + n if",
        "signal n killed it; 143 or 130 stopped by SIGTERM or SIGINT; 2 wrong configuration;",
        "69 a host never arrived or was lost; 126 or 127 torchrun cannot be executed or found.",
    ]
    return "\n".join(lines)
