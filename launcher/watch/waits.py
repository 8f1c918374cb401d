"""Who waits for whom: the coordinator's findings about ranks without progress. Pure.

launcher/watch/__init__.py defines a wait, its root and a stall. There are two kinds of groups:

- In a recorded group (gloo's) each rank reports in which collective it waits: so we know who waits,
  and who is absent.
- In a counted group (NCCL's) each rank reports how many collectives it has begun, and perhaps that
  the last has not ended. Ranks run ahead of their GPUs: those that have begun more than others
  count as waiting in the first collective that not all have begun, unless the ranks behind are held
  up in their last one. If all have begun the same number, nobody surely waits, unless a member does
  not reply.

Findings are plain values; sentences.py puts them in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.watch.progress import Group, Key, StalledRank


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


class Finding(NamedTuple):
    """A stall: ranks that belong together, none with progress since a time, and why they wait.

    The ranks at the `root` are absent from the first of `waits`, and wait nowhere; or they wait for
    each other, each rank in the wait at the same index. Without a root, all members have begun the
    first of `waits`, and it does not complete. Unless it `is_sure` that a rank still waits, nothing
    is logged and nothing is ended.
    """

    ranks: ReportedRanks
    root: tuple[int, ...]
    waits: tuple[Wait, ...]
    since: float
    is_sure: bool = True

    @property
    def is_making(self) -> bool:
        """Whether ranks wait for others to make a group with them, and in no collective."""
        groups = [group for one in self.ranks.values() for group in one.state.groups]
        return {group.is_making for group in groups if group.waits} == {True}

    @property
    def is_circle(self) -> bool:
        """Whether the ranks at the root wait for each other."""
        return not set(self.root).isdisjoint(self.waits[0].waiting)

    def continues(self, earlier: Finding) -> bool:
        """Tell whether this is an earlier stall, with more facts now."""
        both = self.ranks.keys() & earlier.ranks.keys()
        return bool(both) and not any(earlier.has_progress(rank, self.ranks) for rank in both)

    def has_progress(self, rank: int, later: ReportedRanks) -> bool:
        """Tell whether one of the ranks has made progress since."""
        if rank not in later:
            return True
        before, after = self.ranks[rank].state.groups, later[rank].state.groups
        return before not in ((), after)  # the groups of a silent rank may be unknown


def findings(reports: ReportedRanks) -> list[Finding]:
    """Return all stalls."""
    found = []
    for members, waits in _connected(_waits(reports)):
        if all(rank in reports for rank in members):
            ranks = {rank: reports[rank] for rank in members}
            since = max(one.since for one in ranks.values())
            is_sure = any(wait.is_sure for wait in waits)
            root, of_root = _reason(waits, reports)
            found.append(Finding(ranks, root, of_root, since, is_sure))
    return found


def _reason(
    waits: Sequence[Wait], reports: ReportedRanks
) -> tuple[tuple[int, ...], tuple[Wait, ...]]:
    """Return the root of ranks that belong together, and its waits, as a Finding has them."""
    first_wait = {rank: wait for wait in reversed(waits) for rank in wait.waiting}
    roots = [(wait, [rank for rank in wait.absent if rank not in first_wait]) for wait in waits]
    # A silent rank may wait itself: prefer another root.
    for may_be_silent in (False, True):
        for wait, ranks in roots:
            root = [rank for rank in ranks if may_be_silent or not reports[rank].state.trouble]
            if root:
                return tuple(root), (wait,)
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
    recorded: dict[tuple[Key, int], dict[int, Group]] = {}
    counted: dict[Key, dict[int, Group]] = {}
    for number, one in sorted(reports.items()):
        for group in one.state.groups:
            if group.is_counted and not one.state.trouble:
                counted.setdefault(group.key, {})[number] = group
            elif group.waits and not group.is_counted:
                recorded.setdefault((group.key, group.waits), {})[number] = group
    waits = [wait for views in recorded.values() for wait in _recorded_waits(views, reports)]
    waits += [wait for views in counted.values() for wait in _counted_waits(views, reports)]
    return sorted(waits, key=lambda wait: (-len(wait.waiting), wait.group))


# Both take `views`: a group as seen by its ranks that wait, or reply.


def _recorded_waits(views: Mapping[int, Group], reports: ReportedRanks) -> list[Wait]:
    """Return the wait of these ranks in one collective of a recorded group."""
    group = next(iter(views.values()))
    absent = [one for one in group.members if one in reports and _lacks(reports[one].state, group)]
    replying = tuple(rank for rank in views if not reports[rank].state.trouble)
    if absent:
        return [Wait(group, tuple(views), tuple(absent), is_sure=bool(replying))]
    return [Wait(group, replying, ())] if replying else []  # otherwise all may have continued


def _lacks(rank: StalledRank, group: Group) -> bool:
    """Tell whether a rank has surely not begun the collective in which another rank waits."""
    last = rank.last_begun(group.key)
    return last is not None and last < group.waits


def _counted_waits(views: Mapping[int, Group], reports: ReportedRanks) -> list[Wait]:
    """Return the waits in a counted group, by the ranks that reply."""
    furthest = max(views.values(), key=lambda view: view.last)
    least = min(view.last for view in views.values())
    is_uneven = least < furthest.last
    unknown = [rank for rank in furthest.members if rank in reports and rank not in views]
    silent = [rank for rank in unknown if _may_be_behind(reports[rank].state, furthest, is_uneven)]
    if silent and furthest.last:
        # Their progress is unknown; ranks that have ended may have completed everything.
        is_sure = is_uneven or not all(reports[rank].state.has_ended for rank in silent)
        in_last = furthest._replace(waits=furthest.last)
        return [Wait(in_last, tuple(views), tuple(silent), is_sure)]
    waits = []
    behind = {rank: view for rank, view in views.items() if view.last == least}
    ahead = [rank for rank in views if rank not in behind]
    absent = [rank for rank, view in behind.items() if not view.waits]
    if ahead and absent:
        waits.append(Wait(furthest._replace(waits=least + 1), tuple(ahead), tuple(absent)))
    # In a collective that all have begun, ranks wait whose GPUs have not ended it.
    unfinished = [rank for rank, view in (behind if absent else views).items() if view.waits]
    if unfinished and not unknown:
        waits.append(Wait(furthest._replace(waits=least), tuple(unfinished), ()))
    return waits


def _may_be_behind(silent: StalledRank, furthest: Group, is_uneven: bool) -> bool:
    """Tell whether the others may wait for a rank that does not reply."""
    if not silent.trouble:
        return False
    is_behind = (silent.last_begun(furthest.key) or 0) < furthest.last
    return is_behind or not (is_uneven or silent.has_ended)
