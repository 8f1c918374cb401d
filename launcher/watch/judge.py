"""The coordinator's part of the watch: when a stall is logged, and when it is a failure. Pure.

It receives the hosts' reports. `check` returns what is due: lines for the log and stacks; it sets
`hang` if the coordinator must fail the attempt. launcher/watch/__init__.py explains when and why.
Times are on the clock time.monotonic(), waits in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from launcher.watch import sentences, stacks
from launcher.watch.progress import StalledRank
from launcher.watch.waits import Finding, Reported, ReportedRanks, findings

_SETTLE_SECONDS = 1.0  # for all hosts to report
_PROGRESS_SECONDS = 10.0  # after progress, without a failure, until it is logged
_REPORT_SECONDS = 3.0  # after a poll, until its replies are known here
_ONE_LINE_SECONDS = 1.0  # between idle ranks that share one line
_MOST_LINES = 5  # at once


class Stall(NamedTuple):
    """A finding that is tracked from one analysis to the next."""

    finding: Finding
    notice_at: float  # when it is logged next
    logged: str = ""  # the reason that was logged last; "": none yet
    progress_at: float = math.inf  # when there was progress, perhaps after a time-out of torch's
    root_has_progress: bool = False


class Idle(NamedTuple):
    """A rank that still runs after its script, or stands still before any collective."""

    rank: StalledRank
    since: float
    notice_at: float


class Hang(NamedTuple):
    """Why the attempt has failed."""

    text: str
    may_restart: bool


class Stalls(NamedTuple):
    """The state of an attempt's ranks without progress.

    The coordinator begins it with all hosts in `busy`.
    """

    notify: float = math.inf  # --launcher-hang-notify
    timeout: float = math.inf  # --launcher-hang-timeout
    every: float = math.inf  # --launcher-watch: between polls
    reports: Mapping[str, tuple[Reported, ...]] = {}  # by host
    analyse_at: float = math.inf  # when there are new reports
    stalls: tuple[Stall, ...] = ()
    idle: Mapping[int, Idle] = {}  # by rank
    # Hosts with a rank that is still working.
    busy: frozenset[str] = frozenset()
    hang: Hang | None = None
    notes: bool = True  # --launcher-notes
    alone: Mapping[str, int] = {}  # how many ranks of a host have succeeded, if each worked alone
    gathering: stacks.Gathering = stacks.Gathering()  # of where ranks are

    @property
    def patience(self) -> float:
        """The age of a stall when it is first logged."""
        return min(self.notify, self.timeout)

    def over_at(self, since: float) -> float:
        """When a stall from then on has surely lasted for the time-out: after two polls."""
        return since + self.timeout + 2 * self.every + _REPORT_SECONDS

    def next_notice(self, since: float, now: float) -> float:
        """When to log again what is logged now: at twice its age."""
        return since + 2 * max(self.notify, now - since)


# Reports of hosts.


def host_reported(
    state: Stalls, host: str, ranks: Sequence[StalledRank], now: float, others: int = 1
) -> Stalls:
    """Receive a host's ranks without progress; other hosts may report at the same time.

    `others` counts its ranks that are still working: that neither wait nor run on after their
    script.
    """
    reports = tuple(Reported(host, rank, now - rank.unchanged) for rank in ranks)
    analyse_at = min(state.analyse_at, now + _SETTLE_SECONDS)
    busy = state.busy | {host} if others else state.busy - {host}
    return state._replace(
        reports={**state.reports, host: reports}, analyse_at=analyse_at, busy=busy
    )


def host_succeeded(state: Stalls, host: str, alone: int) -> Stalls:
    """Receive that all ranks of a host have ended with 0; how many, if all worked `alone`."""
    return state._replace(busy=state.busy - {host}, alone={**state.alone, host: alone})


def nothing_exchanged(state: Stalls) -> tuple[str, ...]:
    """Return the log line if the ranks of a successful job did not work together."""
    count = sum(state.alone.values())
    if not state.notes or count < 2 or not all(state.alone.values()):
        return ()
    return (sentences.nothing_exchanged(count),)


# What is due.


def due(state: Stalls) -> float:
    """Return when `check` is due; infinite: never, as while all ranks make progress."""
    if state.hang:
        return math.inf
    notices = [one.notice_at for one in state.idle.values()]
    stalls = [_due(stall, state) for stall in state.stalls]
    return min((state.analyse_at, _run_on_too_long_at(state), *notices, *stalls))


def _due(stall: Stall, state: Stalls) -> float:
    if stall.progress_at < math.inf:
        return stall.progress_at + _PROGRESS_SECONDS
    finding = stall.finding
    if not finding.is_sure:
        return math.inf
    # An incomplete group ends nothing: there is no collective yet.
    return min(stall.notice_at, math.inf if finding.is_making else state.over_at(finding.since))


def _run_on_too_long_at(state: Stalls) -> float:
    """Return when ranks have run on too long after their scripts, if no rank is working."""
    if state.busy or not _running_on(state):
        return math.inf
    reports = [one for host in state.reports.values() for one in host]
    idle = [one.since for one in reports if one.state.runs_on or one.state.waits]
    return state.over_at(max(idle, default=math.inf))


def check(state: Stalls, now: float) -> tuple[Stalls, list[str], bool]:
    """Return the lines that are due for the log, and whether to log stacks of a new stall.

    `hang` is set when the user's time-out is reached.
    """
    if now >= state.analyse_at:
        state = _analysed(state, now)
    state, lines = _notice_idle(state, now)
    hang, stalls, is_new = state.hang, list[Stall](), False
    run_on = _running_on(state)
    if not hang and now >= _run_on_too_long_at(state):
        hang = Hang(sentences.runs_on(run_on), may_restart=False)
    for stall in state.stalls:
        if now < _due(stall, state):
            stalls.append(stall)
            continue
        finding = stall.finding
        if stall.progress_at < math.inf:
            lines.append(sentences.progress(finding, stall.progress_at))
            continue  # drop it
        if now >= stall.notice_at:
            reason = sentences.reason(finding)
            lines.append(sentences.stall(finding, now, "" if reason == stall.logged else reason))
            is_new = is_new or not (stall.logged or finding.is_making)
            notice_at = state.next_notice(finding.since, now)
            stall = stall._replace(notice_at=notice_at, logged=reason)
        if not (hang or finding.is_making) and now >= state.over_at(finding.since):
            # A rank whose script has ended may be making its last save.
            may_restart = not any(rank in run_on for rank in finding.root)
            hang = Hang(sentences.stall(finding, now), may_restart)
        stalls.append(stall)
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} more like these."]
    return state._replace(stalls=tuple(stalls), hang=hang), lines, is_new


def _notice_idle(state: Stalls, now: float) -> tuple[Stalls, list[str]]:
    """Return the lines that are due for idle ranks: one of a kind, also for those due soon."""
    if all(now < one.notice_at for one in state.idle.values()):
        return state, []
    soon = now + _ONE_LINE_SECONDS
    due_now = {rank: one for rank, one in state.idle.items() if one.notice_at <= soon}
    noticed = {
        rank: one._replace(notice_at=state.next_notice(one.since, now))
        for rank, one in due_now.items()
    }
    run_on = {rank: one.rank for rank, one in due_now.items() if one.rank.runs_on}
    silent = {rank: one for rank, one in due_now.items() if not one.rank.runs_on}
    lines = [sentences.runs_on(run_on)] if run_on else []
    if silent:
        first = silent[min(silent)]
        lines.append(sentences.silent(first.rank, now - first.since, len(silent) - 1))
    return state._replace(idle={**state.idle, **noticed}), lines


def _running_on(state: Stalls) -> Mapping[int, StalledRank]:
    """Return the ranks that still run after their script."""
    return {number: one.rank for number, one in state.idle.items() if one.rank.runs_on}


def reason_of_wait(state: Stalls, rank: int, now: float, *, is_timeout: bool = False) -> str:
    """Return why a rank waited that torch's time-out has ended, "" if unknown.

    If its own words show that it `is_timeout`, that wait may not have been logged yet.
    """
    if is_timeout and state.analyse_at < math.inf:
        state = _analysed(state, now)
    for stall in state.stalls:
        finding = stall.finding
        is_known = finding.is_sure and finding.root and not stall.root_has_progress
        waits = rank in finding.ranks and rank not in finding.root
        if is_known and waits and now >= finding.since + state.notify:
            return sentences.stall(finding, min(now, stall.progress_at))
        if is_known and waits and is_timeout:
            return f"{sentences.reason(finding)}."
    return ""


# Stalls.


def _analysed(state: Stalls, now: float) -> Stalls:
    """Analyse again who waits for whom, and which tracked stalls continue."""
    reports = {one.state.rank: one for host in state.reports.values() for one in host}
    by_rank: dict[int, list[int]] = {}
    for number, stall in enumerate(state.stalls):
        for rank in stall.finding.ranks:
            by_rank.setdefault(rank, []).append(number)
    stalls, continued = [], set[int]()
    for finding in findings(reports):
        if finding.is_making and not state.notes:
            continue
        near = {number for rank in finding.ranks for number in by_rank.get(rank, ())}
        same = [number for number in near if _continues(finding, state.stalls[number])]
        stalls.append(_followed(finding, [state.stalls[number] for number in same], state))
        continued.update(same)
    for number, stall in enumerate(state.stalls):
        if stall.logged and number not in continued:
            stalls.append(_with_progress(stall, reports, now))
    named = {rank for stall in stalls for rank in stall.finding.ranks}
    idle = _idle(state, reports, named)
    return state._replace(stalls=tuple(stalls), idle=idle, analyse_at=math.inf)


def _continues(finding: Finding, stall: Stall) -> bool:
    """Tell whether a finding belongs to a tracked stall, without progress in between."""
    is_before = finding.since + _REPORT_SECONDS < stall.progress_at
    return is_before and finding.continues(stall.finding)


def _followed(finding: Finding, earlier: Sequence[Stall], state: Stalls) -> Stall:
    """Return the stall of a finding; it may continue several earlier ones."""
    since = min((finding.since, *(stall.finding.since for stall in earlier)))
    notice_at = min((stall.notice_at for stall in earlier), default=since + state.patience)
    logged = next((stall.logged for stall in earlier if stall.logged), "")
    return Stall(finding._replace(since=since), notice_at, logged)


def _with_progress(stall: Stall, reports: ReportedRanks, now: float) -> Stall:
    """Return a stall that is no longer found, with the time of its progress."""
    root = stall.finding.root
    root_has_progress = any(stall.finding.has_progress(rank, reports) for rank in root)
    return stall._replace(
        progress_at=min(stall.progress_at, now),
        root_has_progress=stall.root_has_progress or root_has_progress,
    )


def _idle(state: Stalls, reports: ReportedRanks, named: Collection[int]) -> Mapping[int, Idle]:
    """Return the idle ranks, without silent ones that are `named`; since when they are idle."""
    found = {}
    for number, one in reports.items():
        is_silent = one.state.silent and state.notes and number not in named
        if one.state.runs_on or is_silent:
            before = state.idle.get(number)
            if before is None or bool(before.rank.runs_on) != bool(one.state.runs_on):
                before = Idle(one.state, one.since, one.since + state.patience)
            found[number] = before._replace(rank=one.state)
    return found
