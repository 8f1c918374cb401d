"""What --launcher-verbose logs of each step of a state machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from launcher.text.words import Log, short, shortened

_LONGEST = 80  # characters of one value


def described(
    machine: str, before: Any, event: Any, after: Any, actions: Any, seconds: float
) -> str:
    """Return what a step did, `seconds` after the launcher's start; "" if it changed nothing.

    "3.214 s: run Running to Ending (failure) on end (...): signal ranks (pids 71, number 15)".
    """
    was, is_ = _named_phase(before.phase), _named_phase(after.phase)
    if after == before and not actions:
        return ""
    if type(event).__name__ == "Time" and was == is_ and not actions:
        return ""  # what is due next has changed, no more
    to = "" if was == is_ else f" to {is_}"
    done = ", ".join(words(action) for action in actions if not isinstance(action, Log))
    then = f": {done}" if done else ""
    return f"{seconds:.3f} s: {machine} {was}{to} on {words(event)}{then}"


def _named_phase(phase: Any) -> str:
    why = getattr(phase, "why", None)
    return type(phase).__name__ + (f" ({words(why)})" if why else "")


def words(value: Any) -> str:
    """Return an event, an action or one of its values as people read it: `rank ended (pid 71)`."""
    fields = getattr(value, "_fields", None)
    if fields is not None:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(value).__name__).lower()
        # A value that is not there, or empty, says nothing.
        said = [
            _named(field.replace("_", " "), words(part))
            for field, part in zip(fields, value)
            if not (part is None or part is False or (type(part) in (str, tuple) and not part))
        ]
        return f"{name} ({', '.join(said)})" if said else name
    if isinstance(value, Enum):
        return value.name.lower().replace("_", " ")
    if isinstance(value, Mapping):
        return short(" ".join(f"{key}" for key in value), _LONGEST)
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "_fields"):
        return shortened("; ".join(words(one) for one in value), 3 * _LONGEST)
    return short(value, _LONGEST)


def _named(field: str, text: str) -> str:
    return text if text.startswith(field) else f"{field} {text}"
