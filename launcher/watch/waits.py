"""What hosts report of their ranks, and who waits for whom: the stalls of a job. Pure.

Of a group in which ranks wait, those that have begun least are absent; of these, those that wait
nowhere else are at the root; where there is none, ranks wait for each other, or a collective does
not complete. launcher/watch/__init__.py explains it.

- In a recorded group (gloo's) each rank reports in which collective it waits.
- In a counted group (NCCL's) each rank reports how many collectives it has begun, and perhaps that
  the last has not ended. Ranks run ahead of their GPUs: those that have begun more than others
  count as waiting. If all have begun the same number, nobody surely waits; but a member that does
  not reply counts as one that has begun less.

Stalls are plain values; judge.py puts them in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

ENDED, ENDS = "has ended with exit code 0", "is about to end"  # a rank's trouble
_MOST_RANKS = 1 << 17
_UNKNOWN = 1 << 62  # collectives

WAIT, RUN_ON, STAND_STILL = "wait", "run on", "stand still"  # what the ranks of a stall do
Key = tuple[str, int, bool]


# What ranks reply, and hosts report.


class Group(NamedTuple):
    """One process group, as one of its ranks sees it.

    `ranks` is a text of in_rank.ranges(), `order` is the group's place among groups of the same
    ranks. `last` is the number of the last collective that the rank has begun; `waits` that of the
    first which has not ended, 0 if there is none, `op` its operation (`all_reduce`) and `size` its
    input's size. If collectives are only counted, as for NCCL, `waits` is `last` if that has surely
    not ended, and `op` and `size` are unknown.
    """

    ranks: str
    order: int = 0
    name: str = ""
    last: int = 0
    waits: int = 0
    op: str = ""
    size: str = ""
    is_counted: bool = False

    @property
    def is_making(self) -> bool:
        """Whether it is not complete yet: ranks wait in `op` for others to join it."""
        return self.order < 0

    @property
    def key(self) -> Key:
        """An identity that is the same on each of its ranks; torch's names may differ."""
        return self.ranks, self.order, self.is_counted

    @property
    def members(self) -> range | tuple[int, ...]:
        """The numbers of its ranks, none if the text is not valid."""
        first, _, rest = self.ranks.partition("-")
        last, _, step = rest.partition(":")
        try:
            if not rest:
                return tuple(map(int, self.ranks.split(",")))
            return range(int(first), min(int(last), _MOST_RANKS) + 1, int(step or 1))
        except ValueError:
            return ()


class StalledRank(NamedTuple):
    """One rank, which has made no progress for `unchanged` seconds (0: it makes progress).

    `place` is where its main thread is (`load, data.py:88`); if it `runs_on` after its script, what
    keeps its process alive. `trouble` is why it will begin nothing more, if known: it has ended, or
    does not reply; then its groups are those of its last reply, if any. It `is_still` if it has not
    moved from its place, before its first collective. `fact` explains its wait: why others will not
    come, which exception the rank is handling, or an out-of-memory kill on its host. It may be in
    other groups if it `has_more`. The coordinator adds its `host`, and the time, on its own clock,
    `since` which it has made no progress.
    """

    rank: int
    local_rank: int
    unchanged: float
    trouble: str = ""
    place: str = ""
    groups: tuple[Group, ...] = ()
    runs_on: bool = False
    is_still: bool = False
    fact: str = ""
    has_more: bool = False
    host: str = ""
    since: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether it is known to wait in a collective."""
        return not self.trouble and any(group.waits for group in self.groups)

    @property
    def has_ended(self) -> bool:
        return self.trouble.startswith((ENDED, ENDS))

    def without_waits(self, trouble: str) -> StalledRank:
        """Return this rank as one that has continued from where it waited."""
        groups = tuple(group._replace(waits=0) for group in self.groups)
        return self._replace(trouble=trouble, groups=groups)


class NoProgressReport(NamedTuple):
    """The ranks of a host that have made no progress for a while: the full list, each time.

    `others` counts its ranks that are still working: they neither wait in a collective nor run on
    after their script. In reply to CollectStacks of a `number`: all of its ranks, and the stacks of
    each.
    """

    attempt: int
    ranks: tuple[StalledRank, ...]
    others: int = 1
    number: int = 0
    stacks: tuple[tuple[int, str], ...] = ()


class StacksRequest(NamedTuple):
    """A user at a host requests the stacks of all ranks."""


class CollectStacks(NamedTuple):
    """Report ranks' progress and stacks; a rank that does not reply may get a signal."""

    number: int
    may_signal: bool


class AllStacks(NamedTuple):
    """The stacks of all ranks, for users who have requested them."""

    lines: tuple[str, ...]


# Who waits for whom.

# By number; a rank that is not there, or whose `unchanged` is 0, makes progress.
StalledRanks = Mapping[int, StalledRank]


class Wait(NamedTuple):
    """A collective in which ranks wait.

    All `waiting` have begun it. The `absent` members have not; if there are none, it does not
    complete. Unless it `is_sure` that a rank waits, all may have continued.
    """

    group: Group  # `waits` is the collective's number
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    is_sure: bool

    @property
    def members(self) -> set[int]:
        """All ranks of its group that are known."""
        return {*self.group.members, *self.waiting, *self.absent}


class Stall(NamedTuple):
    """Ranks without progress since a time, why they wait, and what is logged of it.

    The ranks at the `root` are absent from the first of `waits`, and wait nowhere; or they wait for
    each other, each rank in the wait at the same index. Without a root, all members have begun the
    first of `waits`, and it does not complete. Without `waits`, all ranks are at the root, and
    idle: they run on after their scripts, or stand still before any collective. Unless it `is_sure`
    that a rank still waits, nothing is logged and nothing is ended. One of each `kind` lasts at a
    time.
    """

    kind: str
    ranks: StalledRanks
    root: tuple[int, ...]
    waits: tuple[Wait, ...]
    since: float
    is_sure: bool = True
    notice_at: float = math.inf  # when it is logged next
    logged: str = ""  # the reason that was logged last; "": none yet
    named: frozenset[int] = frozenset()  # its ranks; when all have moved, that stall has ended
    progress_at: float = math.inf  # when there was progress, perhaps after a time-out of torch's

    @property
    def lasts(self) -> bool:
        """Whether its ranks surely still make no progress."""
        return self.is_sure and self.progress_at == math.inf

    @property
    def may_fail(self) -> bool:
        """Whether it may fail the attempt: ranks wait in a collective, not to make a group."""
        groups = [group for rank in self.ranks.values() for group in rank.groups]
        return bool(self.waits) and {one.is_making for one in groups if one.waits} != {True}

    @property
    def is_circle(self) -> bool:
        """Whether the ranks at the root wait for each other."""
        return bool(self.waits and self.root) and self.root[0] in self.waits[0].waiting

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait."""
        return tuple(sorted(set(self.ranks) - (set() if self.is_circle else set(self.root))))


def stalls_in(ranks: StalledRanks) -> list[Stall]:
    """Return the stall of ranks that wait, of those that run on, and of those that stand still."""
    found = _stalls_of_waits(ranks)
    members = {number for stall in found for number in stall.ranks}
    run_on = {number: rank for number, rank in ranks.items() if rank.runs_on}
    still = {n: rank for n, rank in ranks.items() if rank.is_still and n not in members}
    for kind, idle in ((RUN_ON, run_on), (STAND_STILL, still)):
        if idle:
            since = min(rank.since for rank in idle.values())
            found.append(Stall(kind, idle, tuple(sorted(idle)), (), since))
    return found


def _stalls_of_waits(ranks: StalledRanks) -> list[Stall]:
    """Return the stall of ranks that wait, if there is one."""
    waits = _waits(ranks)
    first_wait = {rank: wait for wait in reversed(waits) for rank in wait.waiting}
    stuck, before = [wait for wait in waits if ranks.keys() >= wait.members], list[Wait]()
    # Omit waits that a rank with progress will end, itself or through others.
    while stuck != before:
        before = stuck
        stuck = [w for w in before if all(first_wait.get(rank, w) in before for rank in w.absent)]
    if not stuck:
        return []
    of_stall = {number: ranks[number] for wait in stuck for number in wait.members}
    since = max(rank.since for rank in of_stall.values())
    is_sure = any(wait.is_sure for wait in stuck)
    absent = {rank for wait in stuck for rank in wait.absent}
    # A silent rank may have continued from a wait in which nobody else is: then it does not count.
    still = ({r for r in w.waiting if w.is_sure or not ranks[r].trouble} for w in waits)
    idle = absent.difference(*still)
    # But it may wait elsewhere: prefer another root.
    idle = {rank for rank in idle if not ranks[rank].trouble} or idle
    for wait in sorted(stuck, key=lambda wait: (not wait.absent, not wait.is_sure)):
        root = tuple(rank for rank in wait.absent if rank in idle)
        if root or not wait.absent:
            return [Stall(WAIT, of_stall, root, (wait,), since, is_sure)]
    circle = tuple(sorted(absent))
    each = tuple(first_wait[rank] for rank in circle)
    return [Stall(WAIT, of_stall, circle, each, since, is_sure)]


def _waits(ranks: StalledRanks) -> list[Wait]:
    """Return each collective in which ranks wait, the one with the most waiting ranks first."""
    views: dict[Key, dict[int, Group]] = {}
    for number, rank in sorted(ranks.items()):
        for group in rank.groups:
            views.setdefault(group.key, {})[number] = group
    waits = filter(None, (_wait_in(group, ranks) for group in views.values()))
    return sorted(waits, key=lambda wait: (-len(wait.waiting), wait.group))


def _wait_in(views: Mapping[int, Group], ranks: StalledRanks) -> Wait | None:
    """Return who waits in a group, as its ranks see it, and for whom; None if nobody waits.

    Ranks that have begun 7, 7 and 6: the first two, if they are inside #7, wait there for the third
    one. All have begun 7, and two are inside: those wait in #7, nobody is absent.
    """
    furthest = max(views.values(), key=lambda view: view.last)
    members = [rank for rank in sorted({*furthest.members, *views}) if rank in ranks]
    begun = {rank: _begun(ranks[rank], views.get(rank), furthest) for rank in members}
    awake = {rank for rank in views if not ranks[rank].trouble}
    inside = {rank for rank, view in views.items() if view.waits}
    # A silent rank may have begun more since. If others are absent, too, it has begun as much.
    behind = min((begun[rank] for rank in awake - inside), default=_UNKNOWN)
    if behind < max((begun[rank] for rank in awake), default=0):
        silent = {rank for rank in members if ranks[rank].trouble and not ranks[rank].has_ended}
        begun.update((rank, max(begun[rank], behind)) for rank in silent)
    least = min(begun.values())
    may_wait = inside | awake if furthest.is_counted else inside
    waiting = {rank for rank in may_wait if begun[rank] > least}
    absent = {rank for rank, count in begun.items() if count == least} - (inside & awake)
    # Absent ranks that have ended may first have begun all: then only those inside surely wait.
    have_ended = all(ranks[rank].has_ended for rank in absent)
    surely = awake & inside if have_ended else awake
    if not (waiting and absent):
        waiting, absent = inside & awake, set()
    if not waiting or (not absent and _UNKNOWN in begun.values()):
        return None
    number = least + 1
    if not (absent and furthest.is_counted):  # how far a silent rank is may be unknown
        number = min(views[rank].waits for rank in waiting)
    op = next((view.op for view in views.values() if view.waits == number), "")
    group = furthest._replace(waits=number, op=op)
    is_sure = not surely.isdisjoint(waiting)
    return Wait(group, tuple(sorted(waiting)), tuple(sorted(absent)), is_sure)


def _begun(rank: StalledRank, view: Group | None, furthest: Group) -> int:
    """Return how many collectives a member has surely begun, or _UNKNOWN.

    A silent rank's count is that of its last reply. If counts alone show that others wait, it
    counts as one that they may wait for.
    """
    if view is None:
        is_known = bool(rank.trouble) or not furthest.is_counted
        return 0 if is_known and not rank.has_more else _UNKNOWN
    if furthest.is_counted and rank.trouble and not rank.has_ended:
        return min(view.last, max(furthest.last - 1, 0))
    return view.last
