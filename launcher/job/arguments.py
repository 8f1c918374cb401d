"""Reads the launcher's options from the command line and from environment variables.

`--train-script`, `--train-module` and everything that begins with `--launcher-`, or with
`--launcher_`, are the launcher's, wherever they stand. Everything else reaches the script byte for
byte, in order. That is why argparse is not used: its abbreviations, its treatment of `--` and its
reordering would each change somebody's hyperparameters. The command line wins over the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

from launcher.errors import LaunchError, NothingToRunError, UnexpectedError
from launcher.job.options import OPTIONS, SWITCHES, Options, checked, switch
from launcher.text.words import PREFIX, flag, printable, shortened

TARGETS = {"--train-script": "train_script", "--train-module": "train_module"}
FIELDS = {flag(field): field for field in OPTIONS}
# torchrun's variables for our options. Ours win; of these the last that is set counts.
_OF_TORCHRUN = {
    "PET_MAX_RESTARTS": "max_restarts",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "grace",
    "PET_SHUTDOWN_TIMEOUT": "grace",
}
TWINS = {"LAUNCHER_" + field.upper(): field for field in OPTIONS}


def wants_help(argv: Sequence[str]) -> bool:
    """Tell whether these arguments ask the launcher, not the script, for help."""
    return list(argv) in (["--help"], ["-h"]) or any(
        _spelled(word) == PREFIX + "help" for word in argv
    )


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options.

    Raises LaunchError for an unknown option, for a missing or invalid value, if neither a script
    nor a module is named, and if both are.
    """
    sources = {
        field: (variable, environ[variable])
        for variable, field in {**_OF_TORCHRUN, **TWINS}.items()
        if environ.get(variable)
    }
    script_args: list[str] = []
    for typed, field, text in _options_and_words(argv):
        if field:
            sources[field] = (typed[0].partition("=")[0], text)
        else:
            script_args += typed
    values: dict[str, Any] = {
        field: checked(name, text, _parser(field)) for field, (name, text) in sources.items()
    }
    _check_target(values, script_args)
    if values.get("bools") == "flag":
        script_args = _as_flags(script_args)
    options = Options(
        **values,
        script_args=tuple(script_args),
        given=frozenset(field for field in sources if sources[field][0] not in _OF_TORCHRUN),
    )
    # A hang is logged before it ends the job.
    return options._replace(hang_notify=min(options.hang_notify, options.hang_timeout))


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's own words of a command line, and the script's, as they were typed.

    Raises LaunchError for an unknown option and a missing value.
    """
    ours: list[str] = []
    scripts: list[str] = []
    for typed, field, _ in _options_and_words(argv):
        (ours if field else scripts).extend(typed)
    return ours, scripts


def _options_and_words(argv: Sequence[str]) -> Iterator[tuple[list[str], str, str]]:
    """Yield the typed words, with the option's field and value, "" for the script's own."""
    rest = list(reversed(argv))
    while rest:
        word = rest.pop()
        name, equals, text = word.partition("=")
        field = TARGETS.get(name) or (_field(name) if _spelled(name).startswith(PREFIX) else "")
        if not field or equals:
            yield [word], field, text
        else:
            values = _next(name, rest, _parser(field))
            yield [word, *values], field, (values or ["true"])[0]


def _parser(field: str) -> Callable[[str], Any]:
    return OPTIONS[field].parse if field in OPTIONS else str


def _next(name: str, rest: list[str], parser: Callable[[str], Any]) -> list[str]:
    """Take an option's value from the remaining words; a switch needs none.

    SageMaker sends `--flag true`; people type `--flag`. Another word without a dash might be meant
    as the value, or as the script's argument. Raises LaunchError.
    """
    following = rest[-1] if rest else ""
    if parser is switch and following.lower() not in SWITCHES:
        if rest and not following.startswith("-"):
            unless = f"if that is an argument of the script, write {name}=true"
            raise UnexpectedError(name, following, f"true or false ({unless})")
        return []
    if not rest:
        raise LaunchError(f"{name} needs a value; see --launcher-help.")
    if parser is str and following.startswith("-"):
        word = shortened(printable(following), 60)
        raise LaunchError(
            f"{name} needs a value, but is followed by {word}; expected a path (if the path "
            f"starts like that, write {name}={word})."
        )
    return [rest.pop()]


def _spelled(name: str) -> str:
    """Return an option's name with dashes: hyperparameters, and torchrun's, have underscores."""
    return name[:2] + name[2:].replace("_", "-")


def _field(name: str) -> str:
    """Return the field of the option called name, as it was typed."""
    spelled = _spelled(name)
    if spelled in FIELDS:
        return FIELDS[spelled]
    import difflib  # only needed for this error

    near = [option for option in FIELDS if option.startswith(f"{spelled}-")]
    near = near or difflib.get_close_matches(spelled, FIELDS, n=1, cutoff=0.85)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise LaunchError(f"{name} is not a launcher option.{hint} See --launcher-help.")


def _check_target(values: Mapping[str, Any], script_args: Sequence[str]) -> None:
    """Refuse a command line that does not name exactly one script or module."""
    named = [f"{option} {values[field]}" for option, field in TARGETS.items() if field in values]
    if len(named) == 2:
        raise LaunchError(f"{' and '.join(named)} are both given; expected only one of them.")
    if named and named[0].endswith(" "):
        raise LaunchError(f"{named[0]}is empty; expected the training script or module to run.")
    if not named:
        near = [word for word in script_args if _spelled(word.lower()).startswith("--train-")]
        # A script, or a misspelt subcommand.
        near += [word for word in script_args[:1] if not word.startswith("-")]
        kind, hint = (LaunchError if near else NothingToRunError), ""
        if near:
            hint = f" ({shortened(printable(near[0]), 60)} was taken as an argument of the script)"
        raise kind(
            f"there is nothing to run{hint}: give --train-script PATH or --train-module NAME "
            "(on SageMaker: the hyperparameter train-script); see --launcher-help."
        )


def _as_flags(args: Sequence[str]) -> list[str]:
    """Turn `--flag True` into `--flag`, and `--flag False` into nothing.

    SageMaker sends every hyperparameter as two tokens (sagemaker-python-sdk#4247).
    """
    out: list[str] = []
    for word in args:
        may_be_value = bool(out) and out[-1].startswith("-")
        if may_be_value and word in ("False", "false"):
            out.pop()
        elif not (may_be_value and word in ("True", "true")):
            out.append(word)
    return out
