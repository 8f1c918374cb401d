"""A script's arguments as a job's hyperparameters, where SageMaker could pass them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.job import toolkit

_NUMBER = r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"


class Passable(NamedTuple):
    """Arguments as hyperparameters; `refused` is the first that cannot be one, "" if all can."""

    hyperparameters: Mapping[str, str]
    refused: str = ""


def of_arguments(args: Sequence[str]) -> Passable:
    """Read `--key value`, `--key=value` and `-k value`, each key once."""
    found: dict[str, str] = {}
    rest = list(reversed(args))
    while rest:
        word = rest.pop()
        key, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        name = _name(key)
        if not name or name in found or toolkit.is_platforms_own(name):
            return Passable({}, word)
        if not equals:
            if not rest or _is_option(rest[-1]):
                return Passable({}, word)
            value = rest.pop()
        found[name] = value
    return Passable(found)


def changes(args: Sequence[str], hyperparameters: Mapping[str, str]) -> list[str]:
    """Return what SageMaker makes of the arguments, where that is not what was typed."""
    decoded = {name: toolkit.decoded(value) for name, value in hyperparameters.items()}
    rendered = toolkit.to_cmd_args(decoded)
    changed = []
    for key, value, name in zip(rendered[::2], rendered[1::2], sorted(decoded)):
        typed = (
            f"--{name}" if f"--{name}" in {word.partition("=")[0] for word in args} else f"-{name}"
        )
        if (key, value) != (typed, hyperparameters[name]):
            changed.append(f"{typed} {hyperparameters[name]} becomes {key} {value or repr('')}")
    return changed


def _name(key: str) -> str:
    """Return the hyperparameter that an option would be, "" if none."""
    if re.fullmatch(r"--[^-].*", key, re.DOTALL):
        return key[2:]
    return key[1:] if re.fullmatch(r"-[^-\d.]", key) else ""


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not re.fullmatch(_NUMBER, word, re.IGNORECASE)
