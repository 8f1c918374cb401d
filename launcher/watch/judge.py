"""What the coordinator makes of ranks of which nothing moves: when that is said, and when it ends
the job.

Silence is no fault: rank 0 may evaluate for minutes while the others wait. So what is seen is said
as a fact, after `notify` seconds and after each doubling of them; only the user's own time-out
(`--launcher-hang-timeout`) makes a failure of it, and only once the ranks have been looked at after
it was over, also where one look was missed. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from launcher.text.words import lasted
from launcher.watch import returned
from launcher.watch.progress import Rank
from launcher.watch.waits import Finding, Seen, findings

_SETTLES = 1.0  # s until all hosts have said what they see
_IS_PROGRESS = 10.0  # s after a move that no failure has followed
_IS_SEEN = 3.0  # s after a look until it is known here what was seen
_MOST_SAID = 5  # at once


class Known(NamedTuple):
    """A finding, and what was said of it."""

    finding: Finding
    say_at: float
    said: bool = False
    moved_at: float = math.inf  # when something moved again: a time-out of torch's, perhaps
    has_come: bool = False  # a rank that the others wait for


class State(NamedTuple):
    """All that is known of an attempt's ranks of which nothing moves; times in seconds."""

    notify: float = 60
    timeout: float = math.inf
    every: float = 15  # between looks
    hosts: Mapping[str, tuple[Seen, ...]] = {}
    known: tuple[Known, ...] = ()
    look_at: float = math.inf  # when it is worked out again who waits for whom
    hung: str = ""  # why the job ends for a hang, once
    may_restart: bool = True  # after that
    returned: returned.Returned = returned.NONE  # ranks that run on though their script has ended
    # Hosts with ranks that do something else than to wait, to run on so, or to have ended.
    busy: frozenset[str] = frozenset()


def begin(notify: float, timeout: float, every: float, hosts: Iterable[str]) -> State:
    """Return what is known at the start of an attempt of some hosts."""
    return State(notify, timeout, every, busy=frozenset(hosts))


def heard(state: State, host: str, ranks: Sequence[Rank], now: float, others: int = 1) -> State:
    """Take in of which of a host's ranks nothing moves; others may say so at the same time.

    `others` counts its ranks that do something else than to wait, or to run on after their script.
    """
    seen = tuple(Seen(host, rank, now - rank.still) for rank in ranks)
    look_at = min(state.look_at, now + _SETTLES)
    busy = state.busy | {host} if others else state.busy - {host}
    return state._replace(hosts={**state.hosts, host: seen}, look_at=look_at, busy=busy)


def succeeded(state: State, host: str) -> State:
    """Take in that all ranks of a host have ended with 0."""
    return state._replace(busy=state.busy - {host})


def _looked(state: State, now: float) -> State:
    by_rank = {one.rank.rank: one for ranks in state.hosts.values() for one in ranks}
    of_rank: dict[int, list[int]] = {}
    for number, one in enumerate(state.known):
        for rank in one.finding.ranks:
            of_rank.setdefault(rank, []).append(number)
    known, go_on = [], set[int]()
    for finding in findings(by_rank):
        near = {number for rank in finding.ranks for number in of_rank.get(rank, ())}
        near = {number for number in near if _is_same(state.known[number], finding)}
        go_on |= near
        same = [state.known[number] for number in near]
        since = min((finding.since, *(one.finding.since for one in same)))
        say_at = min((one.say_at for one in same), default=since + min(state.notify, state.timeout))
        was_said = any(one.said for one in same)
        known.append(Known(finding._replace(since=since), say_at, was_said))
    for number, one in enumerate(state.known):
        if one.said and number not in go_on:
            has_come = one.has_come or _has_come(one.finding, by_rank)
            known.append(one._replace(moved_at=min(one.moved_at, now), has_come=has_come))
    all_seen = [one for ranks in state.hosts.values() for one in ranks]
    run_on = returned.seen(state.returned, all_seen, min(state.notify, state.timeout))
    return state._replace(known=tuple(known), returned=run_on, look_at=math.inf)


def _is_same(known: Known, finding: Finding) -> bool:
    """Tell whether a finding is of a stall that is known: nothing has moved in between."""
    return finding.since + _IS_SEEN < known.moved_at and finding.is_of(known.finding)


def _has_come(finding: Finding, seen: Mapping[int, Seen]) -> bool:
    """Tell whether a rank has moved that the others wait for."""
    return any(
        rank not in seen or finding.groups[rank] not in ((), seen[rank].rank.groups)
        for rank in finding.named
    )


def due(state: State) -> float:
    """Return when something is to be said or done; infinite: never, while all moves."""
    if state.hung:
        return math.inf
    run_on = min(returned.due(state.returned), _all_return_at(state))
    return min((state.look_at, run_on, *(_due(one, state) for one in state.known)))


def _due(one: Known, state: State) -> float:
    if one.moved_at < math.inf:
        return one.moved_at + _IS_PROGRESS
    if not one.finding.is_sure:
        return math.inf
    return min(one.say_at, _ends_at(one, state))


def _ends_at(one: Known, state: State) -> float:
    """Return when the user's time is over for sure."""
    return one.finding.since + state.timeout + 2 * state.every + _IS_SEEN


def _all_return_at(state: State) -> float:
    """Return when the user's time is over for ranks that run on, if no rank does anything else."""
    if state.busy or not state.returned:
        return math.inf
    since = returned.last_move(one for ranks in state.hosts.values() for one in ranks)
    return since + state.timeout + 2 * state.every + _IS_SEEN


def time(state: State, now: float) -> tuple[State, list[str], bool]:
    """Return what is due to be said, and whether some of it is new, so that stacks are wanted.

    `hung` is set when the user's time is over.
    """
    state = _looked(state, now) if now >= state.look_at else state
    run_on, lines = returned.said(state.returned, state.notify, now)
    known, hung, may_restart, is_new = [], state.hung, True, False
    if now >= _all_return_at(state) and not hung:
        hung, may_restart = returned.sentence(state.returned), False
    for one in state.known:
        if now < _due(one, state):
            known.append(one)
            continue
        if one.moved_at < math.inf:
            lines.append(f"progress again after {lasted(one.moved_at - one.finding.since)}.")
            continue
        if now >= one.say_at:
            lines.append(sentence(one.finding, now))
            is_new = is_new or not one.said
            wait = max(state.notify, now - one.finding.since)
            one = one._replace(say_at=one.finding.since + 2 * wait, said=True)
        if now >= _ends_at(one, state) and not hung:
            hung = sentence(one.finding, now)
            # What a rank does that has returned may be its last save.
            may_restart = not any(rank in state.returned for rank in one.finding.named)
        known.append(one)
    if len(lines) > _MOST_SAID:
        lines[_MOST_SAID:] = [f"... and {len(lines) - _MOST_SAID} more like these."]
    state = state._replace(known=tuple(known), returned=run_on, hung=hung)
    return state._replace(may_restart=may_restart and state.may_restart), lines, is_new


def sentence(finding: Finding, now: float) -> str:
    """Return a finding in words."""
    return f"no progress for {lasted(now - finding.since)}: {finding.what}."


def cause(state: State, rank: int, now: float) -> str:
    """Return why a rank waited that a time-out of torch's has ended, "" if that is not known."""
    for one in state.known:
        waits = rank in one.finding.ranks and rank not in one.finding.named
        waits = waits and one.finding.is_sure
        is_long = now >= one.finding.since + state.notify
        if waits and is_long and one.finding.named and not one.has_come:
            return sentence(one.finding, min(now, one.moved_at))
    return ""
