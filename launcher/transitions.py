"""A state machine's transitions as rows: checked at every step in tests, printed as a page. Pure.

    ROWS = (Row((Joining,), (Start,), (Running,), "start torchrun"), ...)
    EVENTS = {Start: started, ...}

EVENTS says which function takes an event; it branches on the phase in plain sight. ROWS say which
changes of phase an event may bring, in the page's words. They are data and decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Row(NamedTuple):
    """What an event does in a phase; `nexts` are the phases that may follow, but for the same one.

    `may_stay`: the phase may stay although there are `nexts`.
    """

    phases: tuple[type, ...]
    events: tuple[type, ...]
    nexts: tuple[type, ...]
    text: str
    may_stay: bool = False


class NoRow(Exception):
    """A step that no row allows."""


def row_of(rows: Sequence[Row], before: Any, event: Any, after: Any, changed: bool) -> Row | None:
    """Return the row of a step from the phase `before` to the phase `after`.

    None if none names the event in this phase, and nothing `changed` and nothing is to be done.
    Raises NoRow for what no row allows.
    """
    phase, then = type(before), type(after)
    named = [row for row in rows if phase in row.phases and type(event) in row.events]
    for row in named:
        if then in row.nexts or (then is phase and (row.may_stay or not row.nexts)):
            return row
    if named or changed:
        raise NoRow(f"{phase.__name__} to {then.__name__} on {type(event).__name__}")
    return None
