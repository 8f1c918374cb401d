"""Which ranks had ended with exit code 0 when another one saw its connection break. Pure.

Hosts tell how long ago that was, so that no two hosts' clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from launcher.peers.messages import EndedWell
from launcher.text import lasted


class Ends(NamedTuple):
    """When ranks of a host have ended with 0, by the coordinator's clock; `rank` was the first."""

    rank: int
    times: tuple[float, ...]


Known = Mapping[str, Ends]  # by host
NONE: Known = {}


def heard(known: Known, host: str, event: EndedWell, now: float) -> Known:
    """Take in what a host says of its ranks."""
    return {**known, host: Ends(event.rank, tuple(now - age for age in event.ages))}


def before(known: Known, at: float) -> str:
    """Return which rank was the first to end before a time, and how many more; "" if none did."""
    since, who = _first(known, -math.inf, at)
    return _words(who, "had ended", f"{lasted(at - since)} before") if who else ""


def after(known: Known, at: float) -> str:
    """Return the same of ranks that ended after it: their connections may break before they end."""
    since, who = _first(known, at, math.inf)
    return _words(who, "ended", f"{lasted(since - at)} after") if who else ""


def _first(known: Known, since: float, until: float) -> tuple[float, tuple[str, int]]:
    """Return when the first rank ended in a time, and its name with how many more; "" if none."""
    within = {host: [time for time in ends.times if since <= time < until] for host, ends in known.items()}
    first = min(((times[0], host) for host, times in within.items() if times), default=None)
    if first is None:
        return 0.0, ("", 0)
    more = sum(map(len, within.values())) - 1
    return first[0], (f"{first[1]}, rank {known[first[1]].rank}", more)
