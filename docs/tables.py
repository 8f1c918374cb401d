"""Prints the tables of the state machines into how-it-works.md, from the rules in the code.

    make docs                          # fill them in
    python docs/tables.py --print      # print them; either needs the launcher to be importable

Each stands between two comments: `<!-- rules of NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from launcher.peers import first, first_state, other, other_state
from launcher.rules import PhaseEnum, Rule, Rules
from launcher.run import machine as run
from launcher.run import state

PAGE = Path(__file__).with_name("how-it-works.md")


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
    lines += ["", "<details><summary>What the events mean</summary>", ""]
    lines += table("event", "what it means")
    events = {words(event): meaning(event) for row in found for event in row.events}
    lines += [f"| {name} | {means} |" for name, means in sorted(events.items())]
    return "\n".join([*lines, "", "</details>"])


def filled(page: str) -> str:
    """Return a page with the tables of all machines in their places."""
    for name, machine in MACHINES.items():
        begin, end = f"<!-- rules of {name} -->\n", "<!-- end -->"
        before, found, after = page.partition(begin)
        old, ends, rest = after.partition(end)
        if not found or not ends or "<!--" in old:
            raise SystemExit(f"{PAGE} has no place for tables: {begin}{end}")
        page = f"{before}{begin}{printed(machine)}\n{end}{rest}"
    return page


def main() -> None:
    """Fill the tables in, or print them."""
    if sys.argv[1:] == ["--print"]:
        print("\n\n".join(printed(machine) for machine in MACHINES.values()))
    else:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
