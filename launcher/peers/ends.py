"""Name the ranks that ended with 0 before another rank's connection broke. Pure.

Hosts report ages of these ends, so that no two hosts' clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from launcher.peers.messages import Succeeded
from launcher.text.words import lasted


class Ends(NamedTuple):
    """When a host's ranks ended with 0, by the coordinator's clock; `rank` was the first.

    If they `are_all`, `alone` is how many there are, if each worked alone.
    """

    rank: int
    times: tuple[float, ...]
    are_all: bool
    alone: int


def received(message: Succeeded, now: float) -> Ends:
    """Return a host's report with times of this clock."""
    times = tuple(now - age for age in message.ages)
    return Ends(message.rank, times, message.are_all, message.alone)


def named(by_host: Mapping[str, Ends], at: float, what: str) -> str:
    """Return the first rank that ended before a time, with the number of others; "" if none ended.

    `what` happened then. If none had ended yet, return those that were ending: when a rank departs,
    its connections break before its process ends.
    """
    first = [(ends.times[0], host, ends.rank) for host, ends in by_host.items() if ends.times]
    if not first:
        return ""
    since, host, rank = min(first)
    had_ended = since < at
    count = sum(time < at or not had_ended for ends in by_host.values() for time in ends.times)
    who = f"{host}, rank {rank}" + (f" and {count - 1} more" if count > 1 else "")
    if had_ended:
        ago = f"{'the first ' if count > 1 else ''}{lasted(at - since)} before"
        return f"{who} had ended with exit code 0, {ago} {what}"
    return f"{who} {'were' if count > 1 else 'was'} ending with exit code 0 when {what}"
