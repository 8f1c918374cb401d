"""The transition tables of docs/how-it-works.md, and which of their rows jobs have taken.

A row is taken by each step that changes something or has actions: by the phase, the event, and the
next phase. Where that leaves two rows, the words of one of them say more (_WORDS).
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

from launcher.run.state import INTERRUPTS_TO_KILL, Why

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
STAYS = "stays"  # among the next phases: the phase need not change


class Row(NamedTuple):
    """One row of the table of a machine."""

    machine: str
    phases: tuple[str, ...]
    events: tuple[str, ...]
    what: str
    next: tuple[str, ...]

    def leads(self, was: str, to: str) -> bool:
        """Tell whether the next phase is one that the row has."""
        stays = not self.next or STAYS in self.next
        return to in self.next or (to == was and stays)


class Step(NamedTuple):
    """What a machine did; the same steps of all jobs are counted together."""

    machine: str
    phase: str
    event: str
    next: str
    words: str = ""  # that the row must have, among those for the same cell


def _why_is(why: Why) -> Callable[[Any, Any, Any], bool]:
    return lambda before, event, after: getattr(before.phase, "why", None) is why


def _is_third(before: Any, event: Any, after: Any) -> bool:
    return event.number == signal.SIGINT and len(after.interrupts) >= INTERRUPTS_TO_KILL


def _shows_stacks(before: Any, event: Any, after: Any) -> bool:
    return bool(before.shows.deadline < after.shows.deadline)


# Of a machine's cell: what tells its rows apart, the first that is true.
_WORDS: dict[tuple[str, str], tuple[tuple[str, Callable[[Any, Any, Any], bool]], ...]] = {
    ("run", "Signal"): (
        ("the third SIGINT", _is_third),
        ("ended for a restart", _why_is(Why.RESTART)),
        ("after this host's success", _why_is(Why.SUCCESS)),
    ),
    ("coordinator", "Time"): (("`AllStacks`", _shows_stacks),),
}


def tables(page: str | None = None) -> list[Row]:
    """Return the rows of all machines."""
    text = PAGE.read_text(encoding="utf-8") if page is None else page
    found = []
    for machine, table in re.findall(r"<!-- (\w+) -->\n.*\n.*\n((?:\|.*\n)+)<!-- end -->", text):
        for line in table.splitlines():
            phases, on, what, to = (cell.strip() for cell in line.strip("|").split("|"))
            cells = (tuple(re.findall(r"\w+", cell)) for cell in (phases, on))
            found.append(Row(machine, *cells, what, tuple(re.findall(r"\w+", to))))
    return found


ROWS = tables()
TAKEN: Counter[Step] = Counter()  # by any job of this process


def take(machine: str, before: Any, event: Any, after: Any) -> None:
    """Count a step that has changed something, or has actions."""
    was, said = type(before.phase).__name__, type(event).__name__
    words = ""
    for words_of, is_so in _WORDS.get((machine, said), ()):
        if is_so(before, event, after):
            words = words_of
            break
    TAKEN[Step(machine, was, said, type(after.phase).__name__, words)] += 1


def rows_of(step: Step) -> list[Row]:
    """Return the rows that a step takes: none, if the page does not show it."""
    fitting = [
        row
        for row in ROWS
        if row.machine == step.machine
        and step.phase in row.phases
        and step.event in row.events
        and row.leads(step.phase, step.next)
    ]
    told_apart = [words for words, _ in _WORDS.get((step.machine, step.event), ())]
    exact = [row for row in fitting if step.words and step.words in row.what]
    return exact or [row for row in fitting if not any(one in row.what for one in told_apart)]


def not_shown(taken: Counter[Step]) -> list[str]:
    """Return the steps for which there is not one row."""
    return [
        f"{step.machine}: {step.phase} on {step.event} to {step.next}, {count} times"
        for step, count in sorted(taken.items())
        if len(rows_of(step)) != 1
    ]


def not_taken(taken: Counter[Step]) -> list[str]:
    """Return the rows that no step takes, and events, phases and next phases of the others."""
    by_row: dict[Row, set[Step]] = {row: set() for row in ROWS}
    for step in taken:
        for row in rows_of(step):
            by_row[row].add(step)
    return [line for row, steps in by_row.items() for line in _missing(row, steps)]


def _missing(row: Row, steps: set[Step]) -> Iterator[str]:
    name = f"{row.machine}: {', '.join(row.phases)} on {', '.join(row.events)}: {row.what}"
    if not steps:
        yield name
        return
    cells = {(step.phase, step.event) for step in steps}
    for phase in row.phases:
        events = [event for event in row.events if (phase, event) not in cells]
        if events:
            yield f"{name}: {phase} on {', '.join(events)}"
    nexts = [to for to in row.next if to != STAYS and to not in {step.next for step in steps}]
    if nexts:
        yield f"{name}: to {', '.join(nexts)}"
