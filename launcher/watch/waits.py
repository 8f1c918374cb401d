"""Who waits for whom: the stalls of a job, found in its hosts' reports. Pure.

Of a group in which ranks wait, those that have begun least are absent; of these, those that wait
nowhere else are at the root; where there is none, ranks wait for each other, or a collective does
not complete. launcher/watch/__init__.py explains it.

- In a recorded group (gloo's) each rank reports in which collective it waits.
- In a counted group (NCCL's) each rank reports how many collectives it has begun, and perhaps that
  the last has not ended. Ranks run ahead of their GPUs: those that have begun more than others
  count as waiting. If all have begun the same number, nobody surely waits; but a member that does
  not reply counts as one that has begun less.

Stalls are plain values; sentences.py puts them in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.watch.progress import MOST_GROUPS, Group, Key, StalledRank

_UNKNOWN = 1 << 62  # collectives


class Reported(NamedTuple):
    """A rank without progress since a time, as its host has reported it."""

    host: str
    state: StalledRank
    since: float


# The ranks without progress, by number; every other rank makes progress.
ReportedRanks = Mapping[int, Reported]


class Wait(NamedTuple):
    """A collective in which ranks wait."""

    group: Group  # as one of these ranks sees it; `waits` is the collective's number
    waiting: tuple[int, ...]
    absent: tuple[int, ...]  # members that have not begun it
    is_sure: bool = True  # that a rank waits


class Stall(NamedTuple):
    """Ranks that belong together, none with progress since a time; why they wait; what is logged.

    The ranks at the `root` are absent from the first of `waits`, and wait nowhere; or they wait for
    each other, each rank in the wait at the same index. Without a root, all members have begun the
    first of `waits`, and it does not complete. Without `waits`, all ranks are at the root, and
    idle: they run on after their scripts, or stand still before any collective. Unless it `is_sure`
    that a rank still waits, nothing is logged and nothing is ended.
    """

    ranks: ReportedRanks
    root: tuple[int, ...]
    waits: tuple[Wait, ...]
    since: float
    is_sure: bool = True
    notice_at: float = math.inf  # when it is logged next
    logged: str = ""  # the reason that was logged last; "": none yet
    progress_at: float = math.inf  # when there was progress, perhaps after a time-out of torch's

    @property
    def ends_job(self) -> bool:
        """Whether it may end the attempt: ranks wait in a collective, not to make a group."""
        groups = [group for one in self.ranks.values() for group in one.state.groups]
        return bool(self.waits) and {one.is_making for one in groups if one.waits} != {True}

    @property
    def runs_on(self) -> bool:
        """Whether it is about ranks that run on after their scripts."""
        return not self.waits and self.ranks[self.root[0]].state.runs_on

    @property
    def is_circle(self) -> bool:
        """Whether the ranks at the root wait for each other."""
        return bool(self.waits and self.root) and self.root[0] in self.waits[0].waiting

    @property
    def waiting(self) -> frozenset[int]:
        """The ranks that wait."""
        return frozenset(self.ranks) - (frozenset() if self.is_circle else frozenset(self.root))

    def continues(self, earlier: Stall) -> bool:
        """Tell whether this is an earlier stall, with more facts now."""
        both = self.ranks.keys() & earlier.ranks.keys()
        if (bool(self.waits), self.runs_on) != (bool(earlier.waits), earlier.runs_on):
            return False
        return bool(both) and not any(earlier.has_progress(rank, self.ranks) for rank in both)

    def has_progress(self, rank: int, later: ReportedRanks) -> bool:
        """Tell whether one of the ranks has made progress since."""
        if rank not in later:
            return True
        before, after = self.ranks[rank].state.groups, later[rank].state.groups
        return before not in ((), after)  # the groups of a silent rank may be unknown


def stalls_in(reports: ReportedRanks) -> list[Stall]:
    """Return all stalls; last the ranks that run on, and those that stand still elsewhere."""
    found, named = list[Stall](), set[int]()
    for members, waits in _connected(_waits(reports)):
        if all(rank in reports for rank in members):
            named |= members
            ranks = {rank: reports[rank] for rank in members}
            since = max(one.since for one in ranks.values())
            is_sure = any(wait.is_sure for wait in waits)
            found.append(Stall(ranks, *_reason(waits, reports), since, is_sure))
    run_on = {rank: one for rank, one in reports.items() if one.state.runs_on}
    still = {rank: one for rank, one in reports.items() if one.state.is_still and rank not in named}
    for idle in filter(None, (run_on, still)):
        since = min(one.since for one in idle.values())
        found.append(Stall(idle, tuple(sorted(idle)), (), since))
    return found


def _reason(
    waits: Sequence[Wait], reports: ReportedRanks
) -> tuple[tuple[int, ...], tuple[Wait, ...]]:
    """Return the root of ranks that belong together, and its waits, as a Stall has them."""
    first_wait = {rank: wait for wait in reversed(waits) for rank in wait.waiting}
    roots = [(wait, rank) for wait in waits for rank in wait.absent if rank not in first_wait]
    # A silent rank may wait itself: prefer another root.
    roots = [one for one in roots if not reports[one[1]].state.trouble] or roots
    if roots:
        wait = roots[0][0]
        return tuple(rank for other, rank in roots if other is wait), (wait,)
    for wait in waits:
        if not wait.absent:
            return (), (wait,)
    waited_for = {rank for wait in waits for rank in wait.absent}
    circle = tuple(sorted(waited_for & first_wait.keys()))
    return circle, tuple(first_wait[rank] for rank in circle)


def _connected(waits: Sequence[Wait]) -> list[tuple[set[int], list[Wait]]]:
    """Return which ranks belong together, by the groups in which ranks wait, and their waits."""
    parts: list[tuple[set[int], list[Wait]]] = []
    for wait in waits:
        ranks, together = {*wait.group.members, *wait.waiting, *wait.absent}, [wait]
        for part in [part for part in parts if not ranks.isdisjoint(part[0])]:
            parts.remove(part)
            ranks, together = ranks | part[0], part[1] + together
        parts.append((ranks, together))
    return parts


def _waits(reports: ReportedRanks) -> list[Wait]:
    """Return each collective in which ranks wait, the one with the most waiting ranks first."""
    views: dict[Key, dict[int, Group]] = {}
    for number, one in sorted(reports.items()):
        for group in one.state.groups:
            views.setdefault(group.key, {})[number] = group
    waits = [wait for group in views.values() for wait in _waits_in(group, reports)]
    return sorted(waits, key=lambda wait: (-len(wait.waiting), wait.group))


def _waits_in(views: Mapping[int, Group], reports: ReportedRanks) -> list[Wait]:
    """Return the waits in a group, as its ranks see it."""
    furthest = max(views.values(), key=lambda view: view.last)
    members = [rank for rank in sorted({*furthest.members, *views}) if rank in reports]
    begun = {rank: _begun(reports[rank].state, views.get(rank), furthest) for rank in members}
    least = min(begun.values())
    awake = {rank for rank in views if not reports[rank].state.trouble}
    inside = {rank for rank, view in views.items() if view.waits}
    may_wait = inside | awake if furthest.is_counted else inside
    ahead = tuple(rank for rank in views if begun[rank] > least and rank in may_wait)
    behind = {rank for rank, count in begun.items() if count == least}
    held, waits = inside & awake, list[Wait]()
    absent = tuple(sorted(behind - held))
    if ahead and absent:
        number = least + 1
        if not furthest.is_counted:  # how far a silent rank is may be unknown
            number = max(number, min(views[rank].waits for rank in ahead))
        # Ranks that have ended may have begun all.
        have_ended = all(reports[rank].state.has_ended for rank in absent)
        is_sure = not (awake & inside if have_ended else awake).isdisjoint(ahead)
        waits.append(Wait(_in_collective(views, furthest, number), ahead, absent, is_sure))
        held &= behind
    if held and _UNKNOWN not in begun.values():  # all have begun it
        number = min(views[rank].waits for rank in held)
        waits.append(Wait(_in_collective(views, furthest, number), tuple(sorted(held)), ()))
    return waits


def _begun(rank: StalledRank, view: Group | None, furthest: Group) -> int:
    """Return how many collectives a member has surely begun, or _UNKNOWN.

    A silent rank's count is that of its last reply. If counts alone show that others wait, it
    counts as one that they may wait for.
    """
    if view is None:
        is_known = bool(rank.trouble) or not furthest.is_counted
        has_more = rank.has_more or len(rank.groups) >= MOST_GROUPS
        return 0 if is_known and not has_more else _UNKNOWN
    if furthest.is_counted and rank.trouble and not rank.has_ended:
        return min(view.last, max(furthest.last - 1, 0))
    return view.last


def _in_collective(views: Mapping[int, Group], furthest: Group, number: int) -> Group:
    """Return a group as a rank sees it that waits in a collective, if its calls are recorded."""
    for view in views.values():
        if view.waits == number and not view.is_counted:
            return view
    return furthest._replace(waits=number, op="", size="")
