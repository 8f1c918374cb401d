"""Ranks' progress through their collectives, as ranks reply and hosts report it. Pure."""

from __future__ import annotations

from typing import NamedTuple

ENDED, ENDS = "has ended with exit code 0", "is about to end"  # a rank's trouble
_MOST_RANKS = 1 << 17

Key = tuple[str, int, bool]


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
    moved from its place, before its first collective. `note` explains why others will not come to
    where it waits. It may be in other groups if it `has_more`. The coordinator adds its `host`, and
    the time, on its own clock, `since` which it has made no progress.
    """

    rank: int
    local_rank: int
    unchanged: float
    trouble: str = ""
    place: str = ""
    groups: tuple[Group, ...] = ()
    runs_on: bool = False
    is_still: bool = False
    note: str = ""
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
