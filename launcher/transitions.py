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

    def leads(self, before: type, after: type) -> bool:
        """Tell whether a phase may follow another one; the row has the event, and that other."""
        stays = self.may_stay or not self.nexts
        return after in self.nexts or (stays and after is before)

    def cells(self) -> tuple[str, str, str, str]:
        """Return the row as a table has it: phases, events, what happens, next phases."""
        nexts = [phase.__name__ for phase in self.nexts]
        if nexts and self.may_stay:
            nexts.insert(0, "stays")
        phases = ", ".join(phase.__name__ for phase in self.phases)
        events = ", ".join(f"`{event.__name__}`" for event in self.events)
        return phases, events, self.text, ", ".join(nexts)


class NoRow(Exception):
    """A step that no row allows."""


def row_of(rows: Sequence[Row], before: Any, event: Any, after: Any, changed: bool) -> Row | None:
    """Return the row of a step from the phase `before` to the phase `after`.

    None if nothing has `changed` and nothing is to be done. Raises NoRow for a step that no row
    allows, and for an event that no row names in any phase.
    """
    phase, then = type(before), type(after)
    named = [row for row in rows if type(event) in row.events]
    if named and not changed:
        return None
    for row in named:
        if phase in row.phases and row.leads(phase, then):
            return row
    raise NoRow(f"{phase.__name__} to {then.__name__} on {type(event).__name__}")
