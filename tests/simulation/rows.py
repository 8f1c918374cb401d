"""The transitions of the state machines, which every step in tests and simulated jobs is one of.

A row is taken by each step that changes something or has actions: by the phase, the event, and the
next phase. Where that leaves two rows, the words of one of them say more (_WORDS).
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, get_args

from launcher.peers import coordinator, member
from launcher.peers import events as of_hosts
from launcher.peers.rows import COORDINATOR, MEMBER
from launcher.run import machine
from launcher.run.rows import ROWS as OF_RUN
from launcher.run.state import INTERRUPTS_TO_KILL, Why
from launcher.run.supervisor import ACTIONS
from launcher.transitions import Row, row_of

MACHINES: dict[str, Any] = {"run": machine, "coordinator": coordinator, "member": member}
ROWS: dict[str, tuple[Row, ...]] = {"run": OF_RUN, "coordinator": COORDINATOR, "member": MEMBER}
ACTIONS_OF: dict[str, Any] = {
    "run": ACTIONS,
    "coordinator": get_args(of_hosts.Action),
    "member": get_args(of_hosts.Action),
}


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
    return bool(before.gathering.deadline < after.gathering.deadline)


# Of a machine's cell: what tells its rows apart, the first that is true.
_WORDS: dict[tuple[str, str], tuple[tuple[str, Callable[[Any, Any, Any], bool]], ...]] = {
    ("run", "Signal"): (
        ("the third SIGINT", _is_third),
        ("ended for a restart", _why_is(Why.RESTART)),
        ("after this host's success", _why_is(Why.SUCCESS)),
    ),
    ("coordinator", "Time"): (("`AllStacks`", _shows_stacks),),
}


TAKEN: Counter[Step] = Counter()  # by any job of this process


def checked(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of a machine; it raises for what no row has, and for unknown actions."""

    def checks(state: Any, event: Any, now: float) -> Any:
        after, actions = step(state, event, now)
        check(name, state, event, after, actions)
        return after, actions

    return checks


def check(name: str, before: Any, event: Any, after: Any, actions: Any) -> None:
    """Count a step that has changed something, or has actions. Raises NoRow, AssertionError."""
    event = event.message if isinstance(event, of_hosts.Received) else event
    changed = bool(actions) or after != before
    row_of(ROWS[name], before.phase, event, after.phase, changed)
    assert all(type(action) in ACTIONS_OF[name] for action in actions), actions
    if changed:
        was, said = type(before.phase).__name__, type(event).__name__
        words = ""
        for words_of, is_so in _WORDS.get((name, said), ()):
            if is_so(before, event, after):
                words = words_of
                break
        TAKEN[Step(name, was, said, type(after.phase).__name__, words)] += 1


def rows_of(step: Step) -> list[Row]:
    """Return the rows that a step takes."""
    fitting = [row for row in ROWS[step.machine] if _fits(row, step)]
    told_apart = [words for words, _ in _WORDS.get((step.machine, step.event), ())]
    exact = [row for row in fitting if step.words and step.words in row.text]
    return exact or [row for row in fitting if not any(one in row.text for one in told_apart)]


def _fits(row: Row, step: Step) -> bool:
    nexts = {phase.__name__ for phase in row.nexts}
    if row.may_stay or not nexts:
        nexts.add(step.phase)
    return (
        step.phase in {phase.__name__ for phase in row.phases}
        and step.event in {event.__name__ for event in row.events}
        and step.next in nexts
    )


def ambiguous(taken: Counter[Step]) -> list[str]:
    """Return the steps that more than one row has."""
    return [
        f"{step.machine}: {step.phase} on {step.event} to {step.next}, {count} times"
        for step, count in sorted(taken.items())
        if len(rows_of(step)) != 1
    ]


def not_taken(taken: Counter[Step]) -> list[str]:
    """Return the rows that no step takes, and events, phases and next phases of the others."""
    by_row = {(name, row): set[Step]() for name, rows in ROWS.items() for row in rows}
    for step in taken:
        for row in rows_of(step):
            by_row[step.machine, row].add(step)
    return [line for (name, row), steps in by_row.items() for line in _missing(name, row, steps)]


def _missing(machine_: str, row: Row, steps: set[Step]) -> Iterator[str]:
    phases, events, text, _ = row.cells()
    name = f"{machine_}: {phases} on {events.replace('`', '')}: {text}"
    if not steps:
        yield name
        return
    cells = {(step.phase, step.event) for step in steps}
    for phase in phases.split(", "):
        lacking = [one.__name__ for one in row.events if (phase, one.__name__) not in cells]
        if lacking:
            yield f"{name}: {phase} on {', '.join(lacking)}"
    taken = {step.next for step in steps}
    nexts = [phase.__name__ for phase in row.nexts if phase.__name__ not in taken]
    if nexts:
        yield f"{name}: to {', '.join(nexts)}"
