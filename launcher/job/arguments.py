"""Reads the launcher's options from the command line and from their twins in the environment.

`--train-script`, `--train-module` and everything that begins with `--launcher-`, or with
`--launcher_`, are the launcher's, wherever they stand. Everything else reaches the script byte for
byte, in order. That is why argparse is not used: its abbreviations, its treatment of `--` and its
reordering would each change somebody's hyperparameters. The command line wins over the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

from launcher.errors import LaunchError
from launcher.job.options import INTERNAL, OPTIONS, SWITCHES, Options, switch
from launcher.text.words import PREFIX, flag, printable, shortened

START_WORD = "train"
_TARGETS = _SCRIPT, _MODULE = "--train-script", "--train-module"
# What people mean as a switch's value, and what SageMaker makes of None.
_NO_SWITCH = ("", "0", "1", "yes", "no", "on", "off", "none", "null")


def wants_help(argv: Sequence[str]) -> bool:
    """Tell whether these arguments ask the launcher, not the script, for help."""
    return list(argv) in (["--help"], ["-h"]) or any(
        _spelled(word) == PREFIX + "help" for word in argv
    )


def wants_version(argv: Sequence[str]) -> bool:
    """Tell whether these arguments ask the launcher, not the script, for its version."""
    return list(argv) == ["--version"]


def without_start_word(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the word with which SageMaker starts an image."""
    return list(argv[1:] if list(argv[:1]) == [START_WORD] else argv)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options.

    Raises LaunchError for an unknown option, a missing or invalid value, if neither a script nor
    a module is named, and if both are.
    """
    values, unknown = _from_environment(environ)
    targets: dict[str, str] = {}
    script_args: list[str] = []
    for typed, name, text in _options_and_words(argv):
        if not name:
            script_args.extend(typed)
        elif name in _TARGETS:
            if not text:
                raise LaunchError(
                    f"{name} is empty; expected the training script or module to run."
                )
            targets[name] = text
        else:
            values[_field(name)] = _value(_field(name), text, name)
    _check_targets(targets, script_args, unknown)
    if values.get("bools") == "flag":
        script_args = _as_flags(script_args)
    return Options(
        **values,
        train_script=targets.get(_SCRIPT, ""),
        train_module=targets.get(_MODULE, ""),
        script_args=tuple(script_args),
        given=frozenset(values),
        unknown_twins=tuple(unknown),
    )


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the twins by field, and the variables meant as twins of no option."""
    twins = {"LAUNCHER_" + name.upper(): name for name in OPTIONS}
    values: dict[str, Any] = {}
    unknown = []
    for variable, text in sorted(environ.items()):
        if variable in twins and text:
            values[twins[variable]] = _value(twins[variable], text, variable)
        elif variable not in (*twins, *INTERNAL):
            if variable.startswith("LAUNCHER_") or variable.upper().replace("-", "_") in twins:
                unknown.append(variable)
    return values, unknown


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's own words of a command line, and the script's, as they were typed.

    Raises LaunchError for an unknown option and a missing value.
    """
    ours: list[str] = []
    scripts: list[str] = []
    for typed, name, _ in _options_and_words(argv):
        (ours if name else scripts).extend(typed)
    return ours, scripts


def _options_and_words(argv: Sequence[str]) -> Iterator[tuple[list[str], str, str]]:
    """Yield what was typed, with the option's name and value; without, if it is the script's."""
    rest = list(reversed(argv))
    while rest:
        word = rest.pop()
        name, equals, text = word.partition("=")
        if name not in _TARGETS and not _spelled(name).startswith(PREFIX):
            yield [word], "", ""
            continue
        parser = str if name in _TARGETS else OPTIONS[_field(name)].parse
        if equals:
            yield [word], name, text
        else:
            values = _next(name, rest, parser)
            yield [word, *values], name, (values or ["true"])[0]


def _next(name: str, rest: list[str], parser: Callable[[str], Any]) -> list[str]:
    """Take an option's value from the words that are left; a switch needs none.

    SageMaker sends `--flag true`; people type `--flag`. Raises LaunchError.
    """
    following = rest[-1] if rest else ""
    if parser is switch:
        if rest and following.lower() in _NO_SWITCH:
            raise LaunchError(
                f"{name} is {following!r}; expected true or false (if that is an argument "
                f"of the script, write {name}=true)."
            )
        return [rest.pop()] if following.lower() in SWITCHES else []
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
    fields = {flag(field): field for field in OPTIONS}
    spelled = _spelled(name)
    if spelled in fields:
        return fields[spelled]
    import difflib  # only needed for this error

    known = [option[len(PREFIX) :] for option in fields]
    word = spelled[len(PREFIX) :]
    near = [name for name in known if name.startswith(f"{word}-")]
    near = near or difflib.get_close_matches(word, known, n=1)
    hint = f" Did you mean {' or '.join(PREFIX + name for name in near)}?" if near else ""
    raise LaunchError(f"{name} is not a launcher option.{hint} See --launcher-help.")


def _value(field: str, text: str, where: str) -> Any:
    try:
        return OPTIONS[field].parse(text)
    except ValueError as error:
        raise LaunchError(f"{where} is {text!r}; expected {error}.") from None


def _check_targets(
    targets: Mapping[str, str], script_args: Sequence[str], unknown: Sequence[str]
) -> None:
    """Refuse a command line that does not name exactly one script or module."""
    if len(targets) == 2:
        both = f"{_SCRIPT} {targets[_SCRIPT]} and {_MODULE} {targets[_MODULE]}"
        raise LaunchError(f"{both} are both given; expected only one of them.")
    if not targets:
        near = [word for word in script_args if word.startswith(("--train_", "--train-"))]
        # A script, or a misspelt subcommand.
        near += [word for word in script_args[:1] if not word.startswith("-")]
        hint = f" ({printable(unknown[0])} is not a launcher option)" if unknown else ""
        if near:
            hint = f" ({shortened(printable(near[0]), 60)} was taken as an argument of the script)"
        raise LaunchError(
            f"there is nothing to run{hint}: give {_SCRIPT} PATH or {_MODULE} NAME "
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
