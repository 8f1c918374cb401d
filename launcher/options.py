"""What people type: the launcher's options, apart from the training script's arguments.

`--train-script`, `--train-module` and everything that begins with `--launcher-` are the
launcher's, wherever they stand. All else reaches the script byte for byte, in order, which
is why this is no argparse: its abbreviations, its `--` and its sense of order would each
change somebody's hyperparameters.

Every `--launcher-NAME` has a twin `LAUNCHER_NAME` in the environment, for an estimator's
`environment=`. The command line wins over the twin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from launcher.errors import LaunchError

PREFIX = "--launcher-"
# Set for the launcher's own children (supervise.py); not an option.
RUN_DIR = "LAUNCHER_RUN_DIR"
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
        # These change what torchrun executes, which is the launcher's to say.
        name = word.partition("=")[0].replace("_", "-")
        if name in ("--", "-m", "--module", "--no-python", "--run-path"):
            raise ValueError(f"torchrun options other than {word} (see --train-module)")
    return tuple(words)


def _option(default: Any, parse: Callable[[str], Any], metavar: str, help: str) -> Any:
    return dataclasses.field(
        default=default, metadata={"parse": parse, "metavar": metavar, "help": help}
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """The launcher's options, validated; times are in seconds.

    Every field made by `_option` is one `--launcher-NAME`; README.md explains them.
    """

    nproc_per_node: int | None = _option(
        None, _nproc, "auto|N", "processes per host; auto: its GPUs, else Neuron cores, else 1"
    )
    rdzv_port: int = _option(
        29400, whole(1, 65535), "PORT", "port of the c10d store on the first host"
    )
    peer_port: int = _option(
        29401,
        whole(1, 65535),
        "PORT",
        "port of the launchers' own channel on the first host (reserved: not opened yet)",
    )
    start_timeout: int = _option(
        900, whole(1, 86400), "SECONDS", "how long hosts may be missing before the job fails"
    )
    grace: int = _option(
        100,
        whole(0, 86400),
        "SECONDS",
        "from a stop (SIGTERM) to SIGKILL for the ranks; torch before 2.12 allows at most 30",
    )
    failure_grace: int = _option(
        10, whole(0, 86400), "SECONDS", "the same for the other ranks once one has failed"
    )
    max_restarts: int = _option(0, whole(0, 1000), "N", "torchrun's restarts")
    instance_groups: tuple[str, ...] = _option(
        (), _names, "A,B", "instance groups that take part, in a heterogeneous cluster"
    )
    bools: str = _option(
        "as-is",
        _bools,
        "as-is|flag",
        "how SageMaker's `--flag True` reaches the script: as-is, or as `--flag` or nothing",
    )
    torchrun_args: tuple[str, ...] = _option(
        (), _torchrun_args, "ARGS", "more torchrun arguments, as one shell-quoted string"
    )
    log_dir: str = _option("", str, "DIR", "keep per-rank logs there (torchrun's log dir)")
    peers: bool = _option(
        True, _switch, "true|false", "the channel between hosts (reserved: no effect yet)"
    )
    dry_run: bool = _option(
        False, _switch, "", "print the command and the environment it adds; start nothing"
    )

    # What is not a --launcher-NAME.
    train_script: str = ""
    train_module: str = ""
    script_args: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()  # fields that the user set: those win over PET_…
    unknown_twins: tuple[str, ...] = ()  # LAUNCHER_… variables that are no option's


OPTIONS = {field.name: field for field in dataclasses.fields(Options) if "parse" in field.metadata}


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
        elif variable.startswith("LAUNCHER_") and variable not in (*twins, RUN_DIR):
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
        if not equals and field and OPTIONS[field].metadata["parse"] is _switch:
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
        raise LaunchError(
            "there is nothing to run: give --train-script PATH or --train-module NAME "
            "(on SageMaker: the hyperparameter train-script); see --launcher-help."
        )
    if values.get("bools") == "flag":
        script_args = _as_flags(script_args)
    options = Options(
        **values,
        train_script=script,
        train_module=module,
        script_args=tuple(script_args),
        given=frozenset(values),
        unknown_twins=tuple(unknown),
    )
    if options.rdzv_port == options.peer_port:
        raise LaunchError(
            f"{flag('rdzv_port')} and {flag('peer_port')} are both {options.rdzv_port}; "
            "expected two different ports."
        )
    return options


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
        return OPTIONS[field].metadata["parse"](text)
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
    groups = {
        "Size of the job": ("nproc_per_node", "instance_groups", "max_restarts"),
        "How hosts meet": ("rdzv_port", "peer_port", "peers", "start_timeout"),
        "How a job ends": ("grace", "failure_grace"),
        "What reaches torchrun and the script": ("bools", "torchrun_args", "log_dir", "dry_run"),
    }
    lines = [
        "usage: sm-launch (--train-script PATH | --train-module NAME)"
        " [--launcher-OPTION VALUE ...] [SCRIPT ARGUMENT ...]",
        "",
        "Run one PyTorch training job on all hosts of a SageMaker cluster with torchrun.",
        "Whatever is not listed here reaches the script unchanged, in order.",
        "",
        "What to run (one of them):",
        "  --train-script PATH  run a Python file, as `python PATH` would",
        "  --train-module NAME  run a module, as `python -m NAME` would",
    ]
    for title, names in groups.items():
        lines += ["", title + ":"]
        for name in names:
            field = OPTIONS[name]
            lines.append(f"  {flag(name)} {field.metadata['metavar']}".rstrip())
            default = "" if field.default in (None, (), "", False) else f" ({field.default})"
            if field.default is True:
                default = " (true)"
            lines.append(f"      {field.metadata['help']}{default}")
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
