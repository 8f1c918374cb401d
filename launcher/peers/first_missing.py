"""Who has not joined yet, and when to say so. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.peers.events import LINE_EVERY, Job, LookUp
from launcher.peers.messages import missing_words
from launcher.text import some_of

_TO_LOOK_UP = 2  # s for names, before a line has to say whether they resolve


class Absent(NamedTuple):
    """Some of the hosts that are missing, whether their names resolve, and how many more are."""

    resolve: Mapping[str, bool | None]
    more: int

    @property
    def words(self) -> str:
        """What a message says."""
        return missing_words(self.resolve, self.more)


class Reminder(NamedTuple):
    """When the next line is due, and what is known for it.

    Times are on the clock time.monotonic(), infinite if nothing is due.
    """

    start_by: float  # when all have to have joined
    line_at: float
    look_up_at: float
    asked: tuple[str, ...] = ()  # whose names are looked up
    resolves: Mapping[str, bool] = {}  # the answers

    @property
    def due(self) -> float:
        """When something is due."""
        return min(self.start_by, self.line_at, self.look_up_at)


def begin(job: Job, now: float) -> Reminder:
    """Return the reminder at the launcher's start."""
    return later(Reminder(now + job.start_timeout, math.inf, math.inf), now)


def look_up(reminder: Reminder, absent: Sequence[str]) -> tuple[Reminder, LookUp]:
    """Find out whether some of the names resolve, before a line has to say so."""
    asked = tuple(some_of(absent))
    resolves = {host: yes for host, yes in reminder.resolves.items() if host not in asked}
    return reminder._replace(asked=asked, resolves=resolves, look_up_at=math.inf), LookUp(asked)


def answered(reminder: Reminder, host: str, resolves: bool) -> Reminder:
    """Note whether a name resolves."""
    return reminder._replace(resolves={**reminder.resolves, host: resolves})


def missing(reminder: Reminder, absent: Sequence[str]) -> Absent:
    """Return who is missing: those whose names were looked up, if they have not joined since."""
    still = set(absent)
    named = [host for host in reminder.asked if host in still] or some_of(absent)
    return Absent({host: reminder.resolves.get(host) for host in named}, len(absent) - len(named))


def later(reminder: Reminder, now: float) -> Reminder:
    """Return the reminder with the next line due."""
    line_at = now + LINE_EVERY
    look_up_at = min(line_at, reminder.start_by) - _TO_LOOK_UP
    return reminder._replace(line_at=line_at, look_up_at=look_up_at)
