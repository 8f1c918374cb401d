"""The coordinator's interface to the watch: reports and requests for stacks. Pure.

Each function returns the new state (judge.Stalls), lines for the log and messages to hosts. Times
are on the clock time.monotonic(), waits in seconds.
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

# torch's words for a collective that did not complete within the group's own timeout.
_TIMED_OUT = re.compile(r"[Tt]imed? ?out|timing out")


class NoProgressReport(NamedTuple):
    """The ranks of a host that have made no progress for a while: the full list, each time.

    `others` counts its ranks that are still working: they neither wait in a collective nor run on
    after their script. In reply to CollectStacks of a `number`: all of its ranks, and their stacks.
    """

    attempt: int
    ranks: tuple[StalledRank, ...]
    others: int = 1
    number: int = 0
    stacks: stacks.Stacks = ()


class StacksRequest(NamedTuple):
    """A user at a host requests the stacks of all ranks."""


class CollectStacks(NamedTuple):
    """Report ranks' progress and stacks; a rank that does not reply may get a signal."""

    number: int
    may_signal: bool


class AllStacks(NamedTuple):
    """The stacks of all ranks, for the users who have requested them."""

    lines: tuple[str, ...]


class Tell(NamedTuple):
    """Send a message to hosts; None: to all hosts of the job."""

    hosts: tuple[str, ...] | None
    message: CollectStacks | AllStacks


Step = tuple[Stalls, tuple[Union[Log, Tell], ...]]


def begin(options: Options, hosts: Collection[str], number: int) -> Stalls:
    """Return the state for a new attempt; `number` is that of the last CollectStacks."""
    # A restart drops pending requests for stacks.
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
    """Log what is due; show stacks without those of late hosts."""
    if now >= state.gathering.deadline:
        return _shown(state, hosts)
    state, lines, is_new = judge.check(state, now)
    asks: tuple[Any, ...] = ()
    if is_new:  # for the log, ranks get a signal only if this stall ends the job anyway
        state, asks = _collect(state, {""}, now, may_signal=state.timeout < math.inf)
    return state, (*map(Log, lines), *asks)


def reported(
    state: Stalls, host: str, report: Any, hosts: Collection[str], now: float, *, is_running: bool
) -> Step:
    """Receive a host's report; show the stacks when all hosts' have arrived.

    After a rank's failure, reports change nothing, unless they were requested after it.
    """
    if is_running or (report.number and report.number == state.gathering.number):
        state = judge.host_reported(state, host, report.ranks, now, report.others)
    if not report.number:
        return state, ()
    gathering = stacks.received(state.gathering, host, report.number, report.stacks)
    state = state._replace(gathering=gathering)
    is_open = gathering.deadline < math.inf
    if is_open and not set(hosts) - set(gathering.received):
        return _shown(state, hosts)
    return state, ()


def requested(state: Stalls, host: str, now: float) -> Step:
    """Collect stacks for a user at a host."""
    return _collect(state, {host}, now, may_signal=True)


def failed(state: Stalls, text: str, now: float) -> Step:
    """Have all hosts report at once if a rank failed because a collective did not complete."""
    if not state.every or not _TIMED_OUT.search(text):
        return state, ()
    return _collect(state, set(), now, may_signal=False)


def reason_of_wait(state: Stalls, rank: int, text: str, now: float) -> str:
    """Return why a rank that failed with this text had waited, "" if unknown."""
    return judge.reason_of_wait(state, rank, now, is_timeout=bool(_TIMED_OUT.search(text)))


def _collect(state: Stalls, requested_by: set[str], now: float, *, may_signal: bool) -> Step:
    gathering = stacks.requested(state.gathering, requested_by, now, may_signal=may_signal)
    before, state = state.gathering.number, state._replace(gathering=gathering)
    if gathering.number == before:
        return state, ()  # a request is under way
    return state, (Tell(None, CollectStacks(gathering.number, may_signal)),)


def _shown(state: Stalls, hosts: Collection[str]) -> Step:
    """Show the stacks to all who have requested them."""
    gathering = state.gathering
    state = state._replace(gathering=stacks.Gathering(gathering.number))
    lines = stacks.shown(gathering, hosts)
    logs = tuple(map(Log, lines)) if "" in gathering.requested_by else ()
    others = tuple(sorted(gathering.requested_by - {""}))
    return state, (*logs, *((Tell(others, AllStacks(lines)),) if others else ()))
