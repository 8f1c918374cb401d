"""What a host records about its job: a line of events.jsonl for each decisive event. Pure.

The state machines decide about a note where they decide about the event; the journal
(host/journal.py) writes it, and `sm-launch timeline` reads it. docs/logs.md explains all events and
fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Note(NamedTuple):
    """An action of a state machine: write one line to events.jsonl.

    Of the `cause` the first line counts; `since` is on the clock System.now(); `host` is this one
    if it is "". Other values that are empty or None are unknown, or do not apply.
    """

    event: str
    rank: int | None = None
    cause: str = ""
    exit_code: int | None = None
    ranks: Sequence[int] = ()
    since: float | None = None
    job: str = ""
    text: str = ""
    host: str = ""
