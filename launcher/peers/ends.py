"""Name the ranks that ended with 0 before another rank's connection broke. Pure.

Hosts report ages of these ends, so that no two hosts' clocks are compared.
"""

from __future__ import annotations

from collections.abc import Collection

from launcher.peers.messages import Succeeded
from launcher.text.words import lasted


def named(ended: Collection[tuple[float, str, Succeeded]], at: float, what: str) -> str:
    """Return the first rank that ended before a time, with the number of others; "" if none ended.

    `what` happened then. If none had ended yet, return those that were ending: when a rank departs,
    its connections break before its process ends. `ended` has when each rank ended, and its host.
    """
    if not ended:
        return ""
    since, host, report = min(ended)
    had_ended = since < at
    count = sum(time < at or not had_ended for time, _, _ in ended)
    who = f"{host}, rank {report.rank}" + (f" and {count - 1} more" if count > 1 else "")
    if had_ended:
        ago = f"{'the first ' if count > 1 else ''}{lasted(at - since)} before"
        return f"{who} had ended with exit code 0, {ago} {what}"
    return f"{who} {'were' if count > 1 else 'was'} ending with exit code 0 when {what}"
