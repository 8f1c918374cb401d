"""What the coordinator makes of ranks of which nothing moves: when that is said, and when it ends
the job.

Silence is no fault: rank 0 may evaluate for minutes while the others wait. So what is seen is said
as a fact, after `notify` seconds and after each doubling of them; only the user's own time-out
(`--launcher-hang-timeout`) makes a failure of it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.text import lasted
from launcher.watch.progress import Rank
from launcher.watch.waits import Finding, Seen, findings

_SETTLES = 1.0  # s until all hosts have said what they see
_IS_PROGRESS = 10.0  # s after a move that no failure has followed


class Known(NamedTuple):
    """A finding, and what was said of it."""

    finding: Finding
    say_at: float
    said: bool = False
    moved_at: float = math.inf  # when something moved again: a time-out of torch's, perhaps


class State(NamedTuple):
    """All that is known of an attempt's ranks of which nothing moves; times in seconds."""

    notify: float = 60
    timeout: float = math.inf
    hosts: Mapping[str, tuple[Seen, ...]] = {}
    known: tuple[Known, ...] = ()
    look_at: float = math.inf  # when it is worked out again who waits for whom
    hung: str = ""  # why the job ends for a hang, once


def heard(state: State, host: str, ranks: Sequence[Rank], now: float) -> State:
    """Take in of which of a host's ranks nothing moves; others may say so at the same time."""
    seen = tuple(Seen(host, rank, now - rank.still) for rank in ranks)
    look_at = min(state.look_at, now + _SETTLES)
    return state._replace(hosts={**state.hosts, host: seen}, look_at=look_at)


def _looked(state: State, now: float) -> State:
    by_rank = {one.rank.rank: one for ranks in state.hosts.values() for one in ranks}
    before, known = list(state.known), []
    for finding in findings(by_rank):
        same = next((one for one in before if _is_same(one, finding)), None)
        if same:
            before.remove(same)
            finding = finding._replace(since=min(finding.since, same.finding.since))
            known.append(same._replace(finding=finding, moved_at=math.inf))
        else:
            known.append(Known(finding, finding.since + state.notify))
    known += [one._replace(moved_at=min(one.moved_at, now)) for one in before if one.said]
    return state._replace(known=tuple(known), look_at=math.inf)


def _is_same(known: Known, finding: Finding) -> bool:
    """Tell whether a finding is of a trouble that is known, of which more may be seen now."""
    if finding.since >= known.moved_at:
        return False
    if known.finding.named or finding.named:
        return bool(set(known.finding.named) & set(finding.named))
    return known.finding.ranks == finding.ranks


def due(state: State) -> float:
    """Return when something is to be said or done; infinite: never, while all moves."""
    if state.hung:
        return math.inf
    return min((state.look_at, *(_due(one, state.timeout) for one in state.known)))


def _due(one: Known, timeout: float) -> float:
    if one.moved_at < math.inf:
        return one.moved_at + _IS_PROGRESS
    return min(one.say_at, one.finding.since + timeout)


def time(state: State, now: float) -> tuple[State, list[str], bool]:
    """Return what is due to be said, and whether some of it is new, so that stacks are wanted.

    `hung` is set when the user's time is over.
    """
    state = _looked(state, now) if now >= state.look_at else state
    known, lines, hung, is_new = [], list[str](), state.hung, False
    for one in state.known:
        if now < _due(one, state.timeout):
            known.append(one)
            continue
        if one.moved_at < math.inf:
            lines.append(f"progress again after {lasted(one.moved_at - one.finding.since)}.")
            continue
        was_said = one.said
        if now >= one.say_at:
            lines.append(sentence(one.finding, now))
            is_new = is_new or not was_said
            wait = max(state.notify, now - one.finding.since)
            one = one._replace(say_at=one.finding.since + 2 * wait, said=True)
        if now >= one.finding.since + state.timeout and not hung:
            hung, is_new = sentence(one.finding, now), is_new or not was_said
        known.append(one)
    return state._replace(known=tuple(known), hung=hung), lines, is_new


def sentence(finding: Finding, now: float) -> str:
    """Return a finding in words."""
    return f"no progress for {lasted(now - finding.since)}: {finding.what}."


def cause(state: State, now: float) -> str:
    """Return what was seen before a rank was aborted by a time-out of torch's, "" if nothing."""
    for one in state.known:
        if one.finding.named and now >= one.finding.since + state.notify:
            return sentence(one.finding, min(now, one.moved_at))
    return ""
