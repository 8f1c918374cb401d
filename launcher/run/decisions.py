"""What --launcher-verbose logs of each step of a host's two state machines. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from launcher.events import Log, Time
from launcher.text import short, shortened

_LONGEST = 80  # characters of one value


def line(machine: str, before: Any, event: Any, after: Any, actions: Any, seconds: float) -> str:
    """Return what a step did, `seconds` after the launcher's start; "" if it changed nothing.

    "3.214 s: run RUNNING to DRAINING on torchrun ended (returncode 0): look".
    """
    if after == before and not actions:
        return ""
    if isinstance(event, Time) and after.phase is before.phase and not actions:
        return ""  # what is due next has changed, no more
    to = "" if after.phase is before.phase else f" to {after.phase.name}"
    done = ", ".join(words(action) for action in actions if not isinstance(action, Log))
    then = f": {done}" if done else ""
    return f"{seconds:.3f} s: {machine} {before.phase.name}{to} on {words(event)}{then}"


def words(value: Any) -> str:
    """Return an event, an action or one of its values as people read it: `rank gone (pid 71)`."""
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
