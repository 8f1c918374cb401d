"""Name the ranks that ended with 0 before another rank's connection broke. Pure.

Hosts report ages of these ends, so that no two hosts' clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from launcher.peers.messages import RanksSucceeded
from launcher.text.words import lasted


class Ends(NamedTuple):
    """When a host's ranks ended with 0, by the coordinator's clock; `rank` was the first."""

    rank: int
    times: tuple[float, ...]


def received(message: RanksSucceeded, now: float) -> Ends:
    """Return a host's report with times of this clock."""
    return Ends(message.rank, tuple(now - age for age in message.ages))


def named(by_host: Mapping[str, Ends], at: float) -> str:
    """Return the first rank that ended before a time, with the number of others; "" if none ended.

    If none had ended yet, return those that ended after it: when a rank departs, its connections
    break before its process ends.
    """
    first = [(ends.times[0], host, ends.rank) for host, ends in by_host.items() if ends.times]
    if not first:
        return ""
    since, host, rank = min(first)
    had, ago = "had ", f"{lasted(at - since)} earlier"
    more = sum(time < at for ends in by_host.values() for time in ends.times) - 1
    if since >= at:
        had, ago = "", f"{lasted(since - at)} later"
        more = sum(len(ends.times) for ends in by_host.values()) - 1
    who = f"{host}, rank {rank}"
    if not more:
        return f"{who} {had}ended with exit code 0, {ago}"
    return f"{who} and {more} more {had}ended with exit code 0, the first {ago}"
