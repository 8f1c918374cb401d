"""Prints tables from the code into the pages: the state machines', the options, the exit codes.

    make docs                          # fill them in, and build the site
    python docs/tables.py              # fill them in; the launcher has to be importable

Each stands between two comments: `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from launcher.job.help import EXIT_CODES, default_of
from launcher.job.options import OPTIONS
from launcher.peers import first, first_state, other, other_state
from launcher.rules import PhaseEnum, Rule, Rules
from launcher.run import machine as run
from launcher.run import state
from launcher.text import flag

PAGES = [Path(__file__).with_name(name) for name in ("how-it-works.md", "options.md")]


class Machine(NamedTuple):
    """A state machine; `files` hold its rules, in the order in which people read them."""

    rules: Rules
    phases: type[PhaseEnum]
    files: tuple[ModuleType, ...]


MACHINES = {
    "a host's run": Machine(state.RULES, state.Phase, run.RULE_FILES),
    "the first host": Machine(first_state.RULES, first_state.Phase, first.RULE_FILES),
    "every other host": Machine(other_state.RULES, other_state.Phase, other.RULE_FILES),
}


class Row(NamedTuple):
    """What happens in one phase on some events."""

    phase: Enum
    events: tuple[type, ...]
    says: str
    to: tuple[Enum, ...]  # other phases alone


def rows(machine: Machine) -> list[Row]:
    """Return all rows, in the order of phases and, in each, of the code."""
    files = [file.__name__ for file in machine.files]

    def place(rule: Rule) -> tuple[int, int]:
        return files.index(rule.handler.__module__), rule.handler.__code__.co_firstlineno

    found: dict[Row, tuple[type, ...]] = {}
    for phase in machine.phases:
        for rule in sorted(machine.rules, key=place):
            if phase in rule.phases:
                row = Row(phase, (), rule.says, tuple(to for to in rule.to if to is not phase))
                found[row] = (*found.get(row, ()), rule.event)
    return [row._replace(events=events) for row, events in found.items()]


def words(event: type) -> str:
    """Return the name of an event as people read it: RankFailed is "rank failed"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", event.__name__).lower()


def meaning(event: type) -> str:
    """Return what an event says: the first line of its docstring."""
    return (event.__doc__ or "").partition("\n")[0]


def table(*head: str) -> Iterator[str]:
    """Return the first two lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"


def printed(machine: Machine) -> str:
    """Return the tables of one machine: its phases, its events, and what happens when."""
    lines = [*table("phase", "what it means", "lasts at most")]
    for phase in machine.phases:
        lines.append(f"| {phase.name} | {phase.meaning} | {phase.time_out} |")
    found = rows(machine)
    lines += ["", *table("in phase", "on", "what happens", "next")]
    last = None
    for row in found:
        shown = "" if row.phase is last else f"**{row.phase.name}**"
        last = row.phase
        events = ", ".join(words(event) for event in row.events)
        to = ", ".join(one.name for one in row.to)
        lines.append(f"| {shown} | {events} | {row.says} | {to} |")
    # "markdown" is for the site, which else takes what is in it for HTML.
    lines += ["", "<details markdown><summary>What the events mean</summary>", ""]
    lines += table("event", "what it means")
    events = {words(event): meaning(event) for row in found for event in row.events}
    lines += [f"| {name} | {means} |" for name, means in sorted(events.items())]
    return "\n".join([*lines, "", "</details>"])


def options() -> str:
    """Return the tables of the launcher's options, one for each group."""
    lines = []
    for group in dict.fromkeys(option.group for option in OPTIONS.values()):
        lines += [f"**{group}**", "", *table("option", "value", "default", "meaning")]
        for name, option in OPTIONS.items():
            if option.group == group:
                value = code(*option.metavar.split("|")) or code("true", "false")
                default = code(default_of(name))
                lines.append(f"| {code(flag(name))} | {value} | {default} | {option.help} |")
        lines.append("")
    return "\n".join(lines[:-1])


def code(*words: str) -> str:
    """Return words as code, with "or" between; "" for none."""
    return " or ".join(f"`{word}`" for word in words if word)


def exit_codes() -> str:
    """Return the table of exit codes."""
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join([*table("code", "when"), *rows])


TABLES = {
    "options": options,
    "exit codes": exit_codes,
    **{f"rules of {name}": partial(printed, machine) for name, machine in MACHINES.items()},
}


def filled(page: str) -> str:
    """Return a page with its tables in their places."""

    def fill(place: re.Match[str]) -> str:
        return f"<!-- {place[1]} -->\n{TABLES[place[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (?!end)(.+?) -->\n(?s:[^<]|<(?!!--))*<!-- end -->", fill, page)


def main() -> None:
    """Fill the tables in."""
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
