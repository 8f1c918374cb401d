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
    first = [(ends.times[0], host, ends.rank) for host, ends in known.items()]
    since, host, rank = min(first, default=(at, "", 0))
    if since >= at:
        return ""
    more = sum(time < at for ends in known.values() for time in ends.times) - 1
    who, ago = f"{host}, rank {rank}", lasted(at - since)
    if not more:
        return f"{who} had ended with exit code 0 {ago} before"
    return f"{who} and {more} more had ended with exit code 0, the first {ago} before"
