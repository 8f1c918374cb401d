"""What was found: one thing that was checked, how it is, and what to do. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from launcher.text import join_and_count, some_of


class Level(enum.Enum):
    """How bad a finding is; only PROBLEM changes the exit code."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"  # a job would fail


class Finding(NamedTuple):
    """One line of the report. `to_do` is empty if all is well."""

    check: str
    level: Level
    seen: str
    to_do: str = ""


def ok(check: str, seen: str) -> Finding:
    """Return the finding that all is well."""
    return Finding(check, Level.OK, seen)


def warning(check: str, seen: str, to_do: str) -> Finding:
    """Return the finding that a job would run, but not well."""
    return Finding(check, Level.WARNING, seen, to_do)


def problem(check: str, seen: str, to_do: str) -> Finding:
    """Return the finding that a job would fail."""
    return Finding(check, Level.PROBLEM, seen, to_do)


def problems(findings: Sequence[Finding]) -> list[Finding]:
    """Return those for which a job would fail."""
    return [finding for finding in findings if finding.level is Level.PROBLEM]


def size(number: float) -> str:
    """Return a number of bytes for people: `63 MiB`, `1.5 GiB`."""
    number /= 1 << 20
    if number < 1024:
        return f"{number:.0f} MiB"
    number /= 1024
    return f"{number:.1f} GiB" if number < 10 else f"{number:.0f} GiB"


def listed(words: Sequence[str]) -> str:
    """Return the first words, and how many more there are."""
    shown = some_of(words)
    return join_and_count(shown, len(words) - len(shown))
