"""Hyperparameters that nobody has made arguments of, where something has made SM_HPS of them.

SDK v3 does not with `command` (aws/sagemaker-python-sdk#5226), nor a shell script that the toolkit
runs and that leaves "$@" out. What v3 does is read from sagemaker-train 1.27.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import LaunchError
from launcher.job.toolkit import decoded, is_platforms_own
from launcher.text.words import join_and_count, printable

_NAMED = 8  # hyperparameters that one line names


def as_arguments(environ: Mapping[str, str]) -> list[str]:
    """Return all hyperparameters as the toolkit renders them, or v3: `--key JSON`, in their order.

    Raises LaunchError if SM_HPS is set and is no JSON object.
    """
    words = decoded(environ.get("SM_USER_ARGS"))
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return words  # the toolkit's own
    known = _known(environ)
    if known is None:
        raise LaunchError(
            "SM_HPS is not a JSON object; expected the hyperparameters as a JSON object."
        )
    return [word for key, value in known.items() for word in (f"--{key}", _rendered(value))]


def not_passed(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the line that names the hyperparameters that are not among the arguments, if any."""
    typed = set(map(_name, argv))
    lost = [key for key in _known(environ) or {} if _name(key) not in typed]
    lost = [key for key in lost if not is_platforms_own(key)]
    if not lost:
        return []
    names = printable(join_and_count(lost[:_NAMED], len(lost[_NAMED:])))
    return [f"these hyperparameters (SM_HPS) are not among the arguments: {names}."]


def _known(environ: Mapping[str, str]) -> dict[str, Any] | None:
    value = decoded(environ.get("SM_HPS") or "{}")
    return value if isinstance(value, dict) else None


def _rendered(value: Any) -> str:
    value = decoded(value) if isinstance(value, str) else value  # v3 does so once more
    return value if isinstance(value, str) else json.dumps(value)


def _name(word: str) -> str:
    """Return the name in `key`, `--key`, `--key=value`, `-k`, and hydra's `key=value`."""
    return word.partition("=")[0].lstrip("-+").replace("_", "-")
