"""What happens to which host, and when: starts, kills and stops. Pure."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.errors import LaunchError


class What(enum.Enum):
    """What is done to a host; of what is due at the same time, this is the order."""

    START = "start"
    STOP = "stop"
    KILL = "kill"


class Event(NamedTuple):
    """Something to be done; `at` is in seconds since the start, `host` is "" for all hosts."""

    at: float
    what: What
    host: str

    @property
    def typed(self) -> str:
        """As on the command line: `algo-2@20`."""
        return f"{self.host}@{self.at:g}"


def make(hosts: Sequence[str], options: Mapping[str, Sequence[str]]) -> tuple[Event, ...]:
    """Return all that is to happen, the first first.

    `options` has what was typed for `late`, `stop` and `kill`. Raises LaunchError for what is not
    HOST@SECONDS, for a host that does not exist, one that is late twice, and one that would be
    stopped or killed before it starts.
    """
    late = [_parsed("--late", text, What.START, hosts) for text in options.get("late", ())]
    starts = {event.host: event for event in late}
    if len(starts) < len(late):
        raise LaunchError(f"--late is given twice for {_twice(late)}; expected once for a host.")
    faults = [_parsed("--stop", text, What.STOP, hosts) for text in options.get("stop", ())]
    faults += [_parsed("--kill", text, What.KILL, hosts) for text in options.get("kill", ())]
    for event in faults:
        if event.host in starts and event.at <= starts[event.host].at:
            raise LaunchError(
                f"--{event.what.value} {event.typed} comes before --late "
                f"{starts[event.host].typed} has started that host; expected a later time."
            )
    events = [starts.get(host, Event(0.0, What.START, host)) for host in hosts]
    return tuple(
        sorted([*events, *faults], key=lambda event: (event.at, list(What).index(event.what)))
    )


def due(events: Sequence[Event], seconds: float) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Return what is to be done `seconds` after the start, and what is left."""
    now = tuple(event for event in events if event.at <= seconds)
    return now, tuple(events[len(now) :])


def _parsed(option: str, text: str, what: What, hosts: Sequence[str]) -> Event:
    host, at, seconds = text.rpartition("@")
    number = re.fullmatch(r"\d+(\.\d*)?|\.\d+", seconds, re.ASCII)
    if not at or not number or math.isinf(float(seconds)):
        form = "HOST@SECONDS such as algo-1@30" + (", or @30" if what is What.STOP else "")
        raise LaunchError(f"{option} is {text!r}; expected {form}.")
    if not host and what is not What.STOP:
        raise LaunchError(f"{option} {text} names no host; expected {hosts[-1]}{text}, say.")
    if host and host not in hosts:
        span = hosts[0] if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
        raise LaunchError(f"{option} {text} names {host!r}; the hosts are {span}.")
    return Event(float(seconds), what, host)


def _twice(events: Sequence[Event]) -> str:
    names = [event.host for event in events]
    return next(name for name in names if names.count(name) > 1)
