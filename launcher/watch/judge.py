"""When a stall is logged, in which words, and when it is a failure: in the coordinator. Pure.

It receives the hosts' reports and requests for stacks. Each function returns the new state, and
lines for the log or commands to all hosts; `hang` is set if the coordinator must fail the attempt.
launcher/watch/__init__.py explains when and why. Times are on the clock System.now(), waits in
seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Union

from launcher.job.options import Options
from launcher.result.causes import Failure, Link, is_secondary, of_hang
from launcher.text.words import (
    Log,
    Note,
    all_ranks,
    join_and_count,
    lasted,
    named_rank,
    plural,
    printable,
)
from launcher.watch import stacks, waits
from launcher.watch.waits import Group, Stall, StalledRank

_SETTLE_SECONDS = 1.0  # for all hosts to report
_PROGRESS_SECONDS = 10.0  # after progress, without a failure, until it is logged
_REPORT_SECONDS = 3.0  # after a poll, until its replies are known here
# torch's words for a collective that did not complete within the group's own timeout.
_TIMED_OUT = re.compile(r"[Tt]imed? ?out|timing out")
_MOST_NAMED = 4  # ranks
_LONGEST_RANKS = 40  # characters
_LOCK_FILE = re.compile(r"(?i)baton|file_?lock|lock_?file|\bflock")
# In these each rank's input has the same size; a root's, or a share's, may have another.
_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base")


class Gathering(NamedTuple):
    """The current request for stacks, if any: for the log, for users, or after a rank's failure."""

    number: int = 0
    deadline: float = math.inf
    is_for_log: bool = False
    may_signal: bool = False  # ranks that do not reply
    received: Mapping[str, tuple[tuple[int, str], ...]] = {}  # by host: ranks, and their stacks


class Stalls(NamedTuple):
    """The state of an attempt's ranks without progress.

    The coordinator begins it with a report of each host, by which all of its ranks are working.
    """

    options: Options = Options()
    reports: Mapping[str, waits.NoProgressReport] = {}  # by host, the last ones, without stacks
    analyse_at: float = math.inf  # when there are new reports
    stalls: tuple[Stall, ...] = ()
    hang: Failure | None = None
    gathering: Gathering = Gathering()


# Lines and notes are this host's, commands for all hosts.
Step = tuple[Stalls, tuple[Union[Log, Note, waits.CollectStacks, waits.AllStacks], ...]]


# Reports of hosts, and requests.


def reported(
    state: Stalls, host: str, report: waits.NoProgressReport, hosts: Collection[str], now: float
) -> Step:
    """Receive a host's report; show the stacks when those of all hosts have arrived."""
    gathering = state.gathering
    ranks = [rank._replace(host=host, since=now - rank.unchanged) for rank in report.ranks]
    kept = report._replace(ranks=tuple(ranks), stacks=())
    state = state._replace(
        reports={**state.reports, host: kept},
        analyse_at=min(state.analyse_at, now + _SETTLE_SECONDS),
    )
    if report.number != gathering.number or gathering.deadline == math.inf:
        return state, ()
    received = {**gathering.received, host: report.stacks}
    state = state._replace(gathering=gathering._replace(received=received))
    return (state, ()) if set(hosts) - set(received) else _shown(state, hosts)


def failed(state: Stalls, now: float) -> Step:
    """Have all hosts report at once what may have made a rank fail."""
    return collect(state, now, may_signal=False) if state.options.watch else (state, ())


def collect(state: Stalls, now: float, *, may_signal: bool, is_for_log: bool = False) -> Step:
    """Have all hosts collect stacks, unless they already do."""
    gathering = state.gathering
    gathering = gathering._replace(is_for_log=is_for_log or gathering.is_for_log)
    if gathering.deadline < math.inf and gathering.may_signal >= may_signal:
        return state._replace(gathering=gathering), ()
    number, deadline = gathering.number + 1, now + stacks.GATHER_SECONDS
    gathering = gathering._replace(
        number=number, deadline=deadline, may_signal=may_signal, received={}
    )
    return state._replace(gathering=gathering), (waits.CollectStacks(number, may_signal),)


def _shown(state: Stalls, hosts: Collection[str]) -> Step:
    """Show the stacks: in the log, if it is for that, and to users who wait for them."""
    lines = tuple(stacks.shown(state.gathering.received, hosts))
    shown: tuple[Any, ...] = (waits.AllStacks(lines),)
    if state.gathering.is_for_log:
        shown = (*map(Log, lines), Note("stacks", text="\n".join(lines)), *shown)
    return state._replace(gathering=Gathering(state.gathering.number)), shown


# What is due.


def due(state: Stalls, *, is_running: bool = True) -> float:
    """Return when `time_is_up` has something to do; infinite: never, while all make progress."""
    if state.hang or not is_running:
        return state.gathering.deadline
    times = [state.gathering.deadline, state.analyse_at]
    for stall in state.stalls:
        times += [_fails_at(stall, state), stall.progress_at + _PROGRESS_SECONDS]
        times += [stall.notice_at] if stall.lasts else []
    return min(times)


def _fails_at(stall: Stall, state: Stalls) -> float:
    """Return when a stall fails the attempt; infinite: never."""
    since = stall.since if stall.may_fail else math.inf
    if stall.kind == waits.RUN_ON and not any(report.others for report in state.reports.values()):
        idle = [rank for rank in _ranks(state).values() if rank.runs_on or rank.waits]
        since = max((rank.since for rank in idle), default=math.inf)
    # Two polls would have shown progress.
    patience = state.options.hang_timeout + 2 * state.options.watch + _REPORT_SECONDS
    return since + patience if stall.lasts else math.inf


def time_is_up(state: Stalls, hosts: Collection[str], now: float) -> Step:
    """Log what is due; show stacks without those of late hosts.

    `hang` is set when the user's time-out is reached.
    """
    if now >= state.gathering.deadline:
        return _shown(state, hosts)
    if now >= state.analyse_at:
        state = _analysed(state, now)
    stalls, actions = list[Stall](), list[Any]()
    for stall in state.stalls:
        if stall.progress_at + _PROGRESS_SECONDS <= now:
            took = lasted(stall.progress_at - stall.since)
            moving = Note("continued", ranks=stall.waiting, since=stall.progress_at)
            actions += [Log(f"ranks are making progress again after {took}."), moving]
            continue
        if stall.lasts and stall.notice_at <= now:
            reason, line = reason_of(stall, now), line_of(stall, now, stall.logged)
            actions.append(Log(line))
            if stall.waits and reason != stall.logged:
                note = Note("stalled", cause=line, ranks=stall.waiting, since=stall.since)
                actions.append(_at_root(note, stall))
            if stall.may_fail and not stall.logged:
                # For the log, ranks get a signal only if this stall ends the job anyway.
                may_signal = state.options.hang_timeout < math.inf
                state, more = collect(state, now, may_signal=may_signal, is_for_log=True)
                actions += more
            notice_at = stall.since + 2 * max(state.options.hang_notify, now - stall.since)
            named = {*stall.root}.union(*(wait.waiting for wait in stall.waits))
            stall = stall._replace(notice_at=notice_at, logged=reason, named=frozenset(named))
        stalls.append(stall)
        if now >= _fails_at(stall, state) and not state.hang:
            # A rank whose script has ended may be making its last save.
            may_restart = not any(stall.ranks[rank].runs_on for rank in stall.root)
            hang = of_hang(line_of(stall, now), may_restart=may_restart)
            lines = [Log(hang.what)] if reason_of(stall, now) != stall.logged else []
            actions += [*lines, _at_root(hang.note, stall)]
            state = state._replace(hang=hang)
    return state._replace(stalls=tuple(stalls)), tuple(actions)


def _at_root(note: Note, stall: Stall) -> Note:
    """Return a note with the rank for which the others wait, if it is a single one."""
    if len(stall.root) != 1:
        return note
    root = stall.ranks[stall.root[0]]
    return note._replace(rank=root.rank, host=root.host)


def reason_of_wait(state: Stalls, rank: int, text: str, now: float) -> str:
    """Return why a rank that failed with this text had waited, or lost another, "" if unknown.

    If the text shows a time-out of torch's, that wait may not have been logged yet. A rank whose
    cleanup takes long has left its groups before anybody sees the exception that it handles.
    """
    is_timeout = bool(_TIMED_OUT.search(text))
    for stall in (_analysed(state, now) if is_timeout else state).stalls:
        if not stall.is_sure or rank not in stall.waiting:
            continue
        if stall.root and now >= stall.since + state.options.hang_notify:
            return line_of(stall, min(now, stall.progress_at))
        if is_timeout and (stall.root or different_calls(stall)):
            return f"{reason_of(stall, now)}."
    for one in _ranks(state).values():
        has_left = one.rank != rank and not (one.groups or one.trouble)
        is_own = one.fact.startswith(f"rank {one.rank} ")
        if has_left and is_own and not is_secondary(Link(message=one.fact)):
            return one.fact
    return ""


# Stalls.


def _analysed(state: Stalls, now: float) -> Stalls:
    """Analyse again who waits for whom; note which tracked stalls continue."""
    ranks, options, stalls = _ranks(state), state.options, list[Stall]()
    tracked = {stall.kind: stall for stall in state.stalls if stall.progress_at == math.inf}
    # A report with stacks also lists ranks that have just moved: a poll must follow its beginning.
    patience = max(options.hang_notify, options.watch + _REPORT_SECONDS)
    for stall in waits.stalls_in(ranks):
        if options.notes or stall.may_fail or stall.kind == waits.RUN_ON:
            notice_at = stall.since + patience
            earlier = tracked.pop(stall.kind, stall)
            if earlier.named & stall.ranks.keys():  # otherwise that one has ended
                stall = stall._replace(logged=earlier.logged, named=earlier.named)
                notice_at = earlier.notice_at
            stalls.append(stall._replace(notice_at=notice_at))
    over = [stall for stall in state.stalls if stall.progress_at < math.inf]
    for stall in (*over, *tracked.values()):
        if stall.logged and stall.waits:
            # If the ranks at its root have moved, too, it does not explain a later failure.
            is_sure = stall.is_sure and ranks.keys() >= set(stall.root)
            progress_at = min(stall.progress_at, now)
            stalls.append(stall._replace(is_sure=is_sure, progress_at=progress_at))
    return state._replace(stalls=tuple(stalls), analyse_at=math.inf)


def _ranks(state: Stalls) -> Mapping[int, StalledRank]:
    """Return all ranks without progress, by number."""
    return {rank.rank: rank for report in state.reports.values() for rank in report.ranks}


# Stalls in words.


def line_of(stall: Stall, now: float, logged: str = "") -> str:
    """Return the line of a stall: how long it has lasted, and why, unless that is `logged`."""
    why = reason_of(stall, now)
    if not stall.waits:
        return f"{why}."
    lasting = f"ranks have made no progress for {lasted(now - stall.since)}"
    return f"{lasting}, for the same reason." if why == logged else f"{lasting}: {why}."


def reason_of(stall: Stall, now: float) -> str:
    """Return why ranks wait, or where idle ranks are."""
    if not stall.waits:
        why = _idle(stall, now)
    elif stall.is_circle:
        why = _circle(stall)
    else:
        why = (_absent if stall.root else _incomplete)(stall)
    facts = [rank.fact for _, rank in sorted(stall.ranks.items()) if rank.fact]
    return printable("; ".join([why, *facts[:1]]))


def _idle(stall: Stall, now: float) -> str:
    """Return where ranks are that run on after their scripts, or stand still."""
    first = stall.ranks[stall.root[0]]
    number, place, more = first.rank, first.place, len(stall.root) - 1
    others = f"; the same applies to {plural(more, 'more rank')}" if more else ""
    if stall.kind == waits.RUN_ON:
        who = f"rank {number}'s script has ended, but its process is still running"
        return f"{who}: {place}{others}"
    hint = " (a lock file of a run that was killed?)" if _LOCK_FILE.search(place) else ""
    lasting = f"for {lasted(now - first.since)}{hint}"
    return f"rank {number} has begun no collective: it is in {place}, {lasting}{others}"


def _absent(stall: Stall) -> str:
    wait, root = stall.waits[0], [stall.ranks[rank] for rank in stall.root]
    first, is_alone = root[0], len(root) == 1
    some = [named_rank(one.host, one.rank, one.local_rank) for one in root[:_MOST_NAMED]]
    count, have = len(wait.waiting), "has" if is_alone else "have"
    others = f"where {plural(count, 'other')} {'is' if count == 1 else 'are'} waiting"
    if wait.group.is_making:
        how = f"{have} not joined {_collective(wait.group)}"
    elif not wait.group.is_counted:
        how = f"{'is' if is_alone else 'are'} absent from {_collective(wait.group)}"
    elif first.trouble:  # it may have begun as much as the others
        how = "no longer takes part" if is_alone else "no longer take part"
        last = f"#{wait.group.last} of {_name(wait.group)}"
        others = f"and no rank has begun a collective after {last}"
    else:
        how = f"{have} not begun {_collective(wait.group)}"
        others = f"which {plural(count, 'rank')} {'has' if count == 1 else 'have'}"
    state = first.trouble or (first.place and not first.runs_on and f"is in {first.place}")
    at = f"; rank {first.rank} {state}" if state else ""
    return f"{join_and_count(some, len(root) - len(some))} {how}, {others}{at}"


def _incomplete(stall: Stall) -> str:
    wait = stall.waits[0]
    count, size = len(wait.waiting), len(wait.group.members)
    some = f"{plural(count, 'rank')} {'is' if count == 1 else 'are'}"
    who = f"{all_ranks(size)} are" if count == size else some
    incomplete = f"{who} in {_collective(wait.group)}, which has not completed"
    members = [stall.ranks[rank] for rank in sorted(wait.members)]
    states = [f"; rank {one.rank} {one.trouble}" for one in members if one.trouble]
    return "".join([different_calls(stall) or incomplete, *states[:1]])


def different_calls(stall: Stall) -> str:
    """Return who is in which operation, with its size if sizes must agree; "" if all are in one.

    If one that waits for a collective is already in the next, the first may differ in its size.
    """
    wait, calls, numbers = stall.waits[0], dict[str, list[int]](), set[int]()
    for rank in wait.waiting:
        for view in stall.ranks[rank].groups:
            if view.key == wait.group.key and view.waits and not view.is_counted:
                size = f" ({view.size})" if view.size and view.op in _SAME_SIZE else ""
                calls.setdefault(f"{view.op} #{view.waits}{size}", []).append(rank)
                numbers.add(view.waits)
    parts = []
    for call, those in sorted(calls.items(), key=lambda one: (len(one[1]), one[1])):
        who = f"rank {those[0]} is" if len(those) == 1 else f"{len(those)} ranks are"
        parts.append(f"{who} in {call}")
    why = ": all ranks must make the same call"
    if len(numbers) > 1:
        why = ", which have not completed"
    some = ", ".join(parts[:_MOST_NAMED])
    return f"{some} of {_name(wait.group)}{why}" if len(parts) > 1 else ""


def _circle(stall: Stall) -> str:
    pairs = list(zip(stall.root, stall.waits))[:_MOST_NAMED]
    where = [f"rank {rank} in {_collective(wait.group)}" for rank, wait in pairs]
    more = len(stall.root) - len(where)
    return f"ranks are waiting for each other: {join_and_count(where, more)}"


def _collective(group: Group) -> str:
    if group.is_making:
        return f"{group.op} of ranks {_short(group.ranks)}"
    return f"{group.op or 'collective'} #{group.waits} of {_name(group)}"


def _name(group: Group) -> str:
    if group.name == "default_pg":
        return "the default group"
    return f"group {group.name or group.order + 1} of ranks {_short(group.ranks)}"


def _short(ranks: str) -> str:
    return f"{ranks[: _LONGEST_RANKS - 3]}..." if len(ranks) > _LONGEST_RANKS else ranks
