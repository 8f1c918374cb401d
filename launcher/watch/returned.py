"""Ranks whose script has ended while their process runs on: when that is said, and when it ends the
job.

A thread may train on after the main one has returned, and an exit handler may save: so it is a fact
that is said, after `notify` seconds and after each doubling of them. The user's own time-out makes
a failure of it only if no rank of the job does anything else any more. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from launcher.text.words import plural
from launcher.watch.progress import Rank
from launcher.watch.waits import Seen

_AT_ONCE = 1.0  # s between ranks of which one line is said


class Known(NamedTuple):
    """A rank that runs on, as it was seen first, and last; and when that is said."""

    rank: Rank
    since: float
    say_at: float


Returned = Mapping[int, Known]  # by rank
NONE: Returned = {}


def seen(known: Returned, ranks: Iterable[Seen], wait: float) -> Returned:
    """Return what is known of all ranks of which nothing moves; `wait` seconds are not said."""
    found = {}
    for one in ranks:
        if one.rank.runs_on:
            new = Known(one.rank, one.since, one.since + wait)
            found[one.rank.rank] = known.get(one.rank.rank, new)._replace(rank=one.rank)
    return found


def due(known: Returned) -> float:
    """Return when something is to be said; infinite: never."""
    return min((one.say_at for one in known.values()), default=float("inf"))


def said(known: Returned, notify: float, now: float) -> tuple[Returned, list[str]]:
    """Return what is due to be said, of all ranks together."""
    if now < due(known):
        return known, []
    of = {number: one for number, one in known.items() if one.say_at <= now + _AT_ONCE}
    after = {
        number: one._replace(say_at=one.since + 2 * max(notify, now - one.since))
        for number, one in of.items()
    }
    return {**known, **after}, [sentence(of)]


def sentence(known: Returned) -> str:
    """Return in what ranks run on, in words: one of them, and how many more there are."""
    number = min(known)
    text = f"rank {number}'s main thread has returned, but its process runs on: "
    text += known[number].rank.runs_on
    more = len(known) - 1
    return f"{text}; the same is true of {plural(more, 'more rank')}." if more else f"{text}."


def last_move(ranks: Iterable[Seen]) -> float:
    """Return since when all ranks that have not ended wait, or run on."""
    times = [one.since for one in ranks if one.rank.runs_on or one.rank.waits]
    return max(times, default=float("inf"))
