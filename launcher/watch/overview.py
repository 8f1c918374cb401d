"""What the coordinator hands to the watch, and does for it: reports, requests for stacks. Pure.

Each function returns what is known then (judge.Stalls), and what is to be done: lines for the log,
and messages to hosts. Times are on the clock time.monotonic(), waits in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple, Union

from launcher.job.options import Options
from launcher.text.words import Log
from launcher.watch import judge, stacks
from launcher.watch.judge import Stalls
from launcher.watch.progress import StalledRank

# What torch says of a collective that did not complete within the group's own timeout.
_TIMED_OUT = re.compile(r"[Tt]imed? ?out|timing out")


class NoProgressReport(NamedTuple):
    """The ranks of a host that have made no progress for a while: all of them, each time.

    `others` counts those that run and neither wait in a collective nor run on after their script.
    For the CollectStacks of a `number`: all of its ranks, and their stacks.
    """

    attempt: int
    ranks: tuple[StalledRank, ...]
    others: int = 1
    number: int = 0
    stacks: stacks.Stacks = ()


class StacksRequest(NamedTuple):
    """Somebody at a host requests the stacks of all ranks."""


class CollectStacks(NamedTuple):
    """Report how far ranks are now, and their stacks; those that do not reply may get a signal."""

    number: int
    may_signal: bool


class AllStacks(NamedTuple):
    """The stacks of all ranks, for those that have requested them."""

    lines: tuple[str, ...]


class Tell(NamedTuple):
    """Send a message to hosts, None: to all of the job."""

    hosts: tuple[str, ...] | None
    message: CollectStacks | AllStacks


Step = tuple[Stalls, tuple[Union[Log, Tell], ...]]


def begin(options: Options, hosts: Collection[str], number: int) -> Stalls:
    """Return what is known as an attempt begins; `number` is that of the last CollectStacks."""
    # A restart cuts off who requested stacks.
    return Stalls(
        options.hang_notify,
        options.hang_timeout,
        options.watch,
        notes=options.notes,
        busy=frozenset(hosts),
        gathering=stacks.Gathering(number),
    )


def due(state: Stalls, *, is_running: bool) -> float:
    """Return when `time_is_up` has something to do; infinite: never."""
    return min(judge.due(state) if is_running else math.inf, state.gathering.deadline)


def time_is_up(state: Stalls, hosts: Collection[str], now: float) -> Step:
    """Log what is due, or the stacks without those of hosts that are late."""
    if now >= state.gathering.deadline:
        return _shown(state, hosts)
    state, lines, is_new = judge.check(state, now)
    asks: tuple[Any, ...] = ()
    if is_new:  # for the log alone no rank gets a signal, unless this stall ends the job anyway
        state, asks = _collect(state, {""}, now, may_signal=state.timeout < math.inf)
    return state, (*map(Log, lines), *asks)


def reported(
    state: Stalls, host: str, report: Any, hosts: Collection[str], now: float, *, is_running: bool
) -> Step:
    """Take in a host's report; show the stacks when all hosts' are here.

    What was known when a rank failed is why it did, but for what was requested since.
    """
    if is_running or (report.number and report.number == state.gathering.number):
        state = judge.host_reported(state, host, report.ranks, now, report.others)
    if not report.number:
        return state, ()
    gathering = stacks.received(state.gathering, host, report.number, report.stacks)
    state = state._replace(gathering=gathering)
    is_open = gathering.deadline < math.inf
    return (
        _shown(state, hosts)
        if is_open and not set(hosts) - set(gathering.received)
        else (
            state,
            (),
        )
    )


def requested(state: Stalls, host: str, now: float) -> Step:
    """Collect stacks for somebody at a host."""
    return _collect(state, {host}, now, may_signal=True)


def failed(state: Stalls, text: str, now: float) -> Step:
    """Have all hosts report at once if a rank has failed since a collective did not complete."""
    if not state.every or not _TIMED_OUT.search(text):
        return state, ()
    return _collect(state, set(), now, may_signal=False)


def reason_of_wait(state: Stalls, rank: int, text: str, now: float) -> str:
    """Return why a rank waited that has failed with a text, "" if that is not known."""
    return judge.reason_of_wait(state, rank, now, is_timeout=bool(_TIMED_OUT.search(text)))


def _collect(state: Stalls, requested_by: set[str], now: float, *, may_signal: bool) -> Step:
    gathering = stacks.requested(state.gathering, requested_by, now, may_signal=may_signal)
    before, state = state.gathering.number, state._replace(gathering=gathering)
    if gathering.number == before:
        return state, ()  # it has been requested just now
    return state, (Tell(None, CollectStacks(gathering.number, may_signal)),)


def _shown(state: Stalls, hosts: Collection[str]) -> Step:
    """Show the stacks to all that have requested them."""
    gathering = state.gathering
    state = state._replace(gathering=stacks.Gathering(gathering.number))
    lines = stacks.shown(gathering, hosts)
    logs = tuple(map(Log, lines)) if "" in gathering.requested_by else ()
    others = tuple(sorted(gathering.requested_by - {""}))
    return state, (*logs, *((Tell(others, AllStacks(lines)),) if others else ()))
