"""Ranks' progress through their collectives, as ranks reply and hosts report it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from launcher.text import wire
from launcher.text.words import printable

MOST_GROUPS = 64  # of a rank's reply, at most
REPORT_BYTES = 60_000  # of a host's message, which may have 64 KiB
ENDED, ENDS = "has ended with exit code 0", "is about to end"  # a rank's trouble
# In characters.
_LONGEST_NAME, _LONGEST_SECONDS = 100, 24
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
        """The numbers of its ranks."""
        return members(self.ranks)

    def short(self) -> list[Any]:
        """Return its fields, without those at the end that have their defaults.

        Most groups have little to report: wire.py writes them in this form.
        """
        fields = list(self)
        while fields[1:] and fields[-1] == self._field_defaults[self._fields[len(fields) - 1]]:
            fields.pop()
        return fields


class StalledRank(NamedTuple):
    """One rank that has made no progress for `unchanged` seconds.

    `place` is where its main thread is (`load, data.py:88`). `trouble` is why it begins nothing any
    more, if known: it has ended, or does not reply; then its groups are those of its last reply, if
    any. `runs_on` is what keeps its process alive after its script, "" before. `silent` is where it
    has stood still before its first collective; `note` explains why others will not come to where
    it waits.
    """

    rank: int
    local_rank: int
    unchanged: float
    trouble: str = ""
    place: str = ""
    groups: tuple[Group, ...] = ()
    runs_on: str = ""
    silent: str = ""
    note: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is known to wait in a collective."""
        return not self.trouble and any(group.waits for group in self.groups)

    @property
    def has_ended(self) -> bool:
        return self.trouble.startswith((ENDED, ENDS))

    def last_begun(self, key: Key) -> int | None:
        """Return its last collective in a group, 0 if none, None if unknown."""
        for group in self.groups:
            if group.key == key:
                return group.last
        return None if len(self.groups) >= MOST_GROUPS else 0

    def without_waits(self, trouble: str) -> StalledRank:
        """Return this rank as one that has continued from where it waited."""
        groups = tuple(group._replace(waits=0) for group in self.groups)
        return self._replace(trouble=trouble, groups=groups)


def members(ranks: str) -> range | tuple[int, ...]:
    """Return the ranks of a text such as `0-7`, `0-56:8` or `0,1,5`.

    Raises ValueError if it is not valid.
    """
    if "-" not in ranks:
        return tuple(_number(text) for text in ranks.split(","))
    first, _, rest = ranks.partition("-")
    last, _, step = rest.partition(":")
    return range(_number(first), _number(last) + 1, _number(step or "1"))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > _MOST_RANKS:
        raise ValueError(text)
    return int(text)


# Data from a rank.


def groups_of(values: Sequence[Mapping[str, Any]]) -> tuple[Group, ...]:
    """Return the groups of a reply. Raises one of several errors if they are not valid."""
    defaults = Group._field_defaults  # defaults are not sent
    groups = []
    for value in values[:MOST_GROUPS]:
        group: Group = wire.read(Group, {**defaults, **value})
        members(group.ranks)  # raises ValueError if they are not valid
        name, op, size = map(_name, (group.name, group.op, group.size))
        groups.append(group._replace(name=name, op=op, size=size))
    return tuple(groups)


def _name(text: str) -> str:
    return printable(text)[:_LONGEST_NAME]


def within(ranks: Iterable[StalledRank], world: int) -> tuple[StalledRank, ...]:
    """Return the ranks whose numbers, and whose groups' numbers, are of a job with `world` ranks.

    The others count as ranks that make progress: no stall is found among ranks that wait for them.
    """
    return tuple(
        one
        for one in ranks
        if one.rank < world and all(_are_within(group.ranks, world) for group in one.groups)
    )


def _are_within(ranks: str, world: int) -> bool:
    try:
        numbers = members(ranks)
    except ValueError:
        return False
    return max(numbers[-1:] if isinstance(numbers, range) else numbers, default=0) < world


def size_of(ranks: Iterable[StalledRank]) -> int:
    """Return how many bytes these ranks take in a message, whatever their age."""
    timeless = (wire.written(rank._replace(unchanged=0)) for rank in ranks)
    return sum(len(json.dumps(rank)) + _LONGEST_SECONDS for rank in timeless)


def bounded(ranks: Iterable[StalledRank], limit: int) -> tuple[StalledRank, ...]:
    """Return as many of these ranks as fit into so many bytes of a message.

    The others count as ranks that make progress, too.
    """
    kept, remaining = [], limit
    for rank in ranks:
        remaining -= size_of([rank])
        if remaining < 0:
            break
        kept.append(rank)
    return tuple(kept)
