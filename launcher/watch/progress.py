"""How far ranks are in their collectives: what ranks reply, and hosts report. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from launcher.text.words import printable

MOST_GROUPS = 64  # of a rank's reply
ENDED, ENDS = "has ended with exit code 0", "is about to end"  # a rank's trouble
# In characters.
_LONGEST_NAME, _LONGEST_RANKS, _LONGEST_SECONDS, _LONGEST_RUNS_ON = 100, 2000, 24, 300
_MOST_RANKS = 1 << 17
_ABOVE_NUMBERS = 10**12

Key = tuple[str, int, bool]


class Group(NamedTuple):
    """One process group, as one of its ranks sees it.

    `ranks` are written as in_rank.ranges() does, `order` is its place among groups of the same
    ranks. `last` is the number of the last collective that the rank has begun; `waits` that of the
    first which has not ended, 0 if there is none, `op` what it is (`all_reduce`) and `size` its
    input's. If what the rank has begun is only counted, as of NCCL, `waits` is `last` if that is
    known not to have ended, and the two others are not known.
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
    def key(self) -> Key:
        """What is the same on each of its ranks; torch's names for it may differ."""
        return self.ranks, self.order, self.is_counted

    @property
    def members(self) -> range | tuple[int, ...]:
        """The numbers of its ranks."""
        return members(self.ranks)


_NO_GROUP = Group("")


class Rank(NamedTuple):
    """One rank that has made no progress for `unchanged` seconds.

    `place` is where its main thread is (`load, data.py:88`). `trouble` is why it begins nothing
    any more, if that is known: it has ended, or does not reply. Then its groups are those of its
    last reply, if there was one. `runs_on` is in what its process runs on though its script has
    ended, "" as long as that runs.
    """

    rank: int
    local_rank: int
    unchanged: float
    trouble: str = ""
    place: str = ""
    groups: tuple[Group, ...] = ()
    runs_on: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is known to wait in a collective."""
        return not self.trouble and any(group.waits for group in self.groups)

    @property
    def has_ended(self) -> bool:
        return self.trouble.startswith((ENDED, ENDS))

    def last_begun(self, key: Key) -> int | None:
        """Return the last collective that it has begun in a group, 0 if none, None: not known."""
        for group in self.groups:
            if group.key == key:
                return group.last
        return None if len(self.groups) >= MOST_GROUPS else 0

    def without_waits(self, trouble: str) -> Rank:
        """Return this rank as one that has continued from where it waited."""
        groups = tuple(group._replace(waits=0) for group in self.groups)
        return self._replace(trouble=trouble, groups=groups)


def members(ranks: str) -> range | tuple[int, ...]:
    """Return the ranks of a text such as `0-7`, `0-56:8` or `0,1,5`.

    Raises ValueError if it is none.
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


# What is sent. All that reads it raises one of several errors if it is not valid.


def to_wire(rank: Rank) -> Mapping[str, Any]:
    """Return the JSON object of a rank; of most groups there is little to report."""
    return {**rank._asdict(), "groups": [_short(group) for group in rank.groups]}


def _short(group: Group) -> list[Any]:
    """Return a group's fields, but for those at the end that are as by default."""
    fields = list(group)
    while fields[1:] and fields[-1] == _NO_GROUP[len(fields) - 1]:
        fields.pop()
    return fields


def from_wire(fields: Mapping[str, Any]) -> Rank:
    """Return the rank of a JSON object."""
    return Rank(
        whole(fields["rank"]),
        whole(fields["local_rank"]),
        seconds(fields["unchanged"]),
        _text(fields["trouble"]),
        _text(fields["place"]),
        groups_of([dict(zip(Group._fields, group)) for group in fields["groups"]]),
        _text(fields["runs_on"], _LONGEST_RUNS_ON),
    )


def groups_of(values: Sequence[Mapping[str, Any]]) -> tuple[Group, ...]:
    """Return the groups of JSON objects."""
    return tuple(map(_group, values[:MOST_GROUPS]))


def _group(fields: Mapping[str, Any]) -> Group:
    group = Group(
        _text(fields["ranks"], _LONGEST_RANKS),
        whole(fields.get("order", 0)),
        _text(fields.get("name", "")),
        whole(fields.get("last", 0)),
        whole(fields.get("waits", 0)),
        _text(fields.get("op", "")),
        _text(fields.get("size", "")),
        fields.get("is_counted", False) is True,
    )
    members(group.ranks)
    return group


def _text(value: Any, limit: int = _LONGEST_NAME) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_RANKS:
        raise ValueError(value)
    return printable(value)[:limit]


def whole(value: Any) -> int:
    """Return a number that was sent. Raises ValueError if it is none."""
    if type(value) is not int or not 0 <= value < _ABOVE_NUMBERS:
        raise ValueError(value)
    return value


def seconds(value: Any) -> float:
    """Return a time that was sent. Raises ValueError if it is none."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(value)
    return float(value)


def within(ranks: Iterable[Rank], world: int) -> tuple[Rank, ...]:
    """Return the ranks of which all is of ranks of a job with so many.

    The others count as ranks that make progress: no stall is found of those that wait for them.
    """
    return tuple(
        one
        for one in ranks
        if one.rank < world and all(_highest(group.members) < world for group in one.groups)
    )


def _highest(ranks: range | tuple[int, ...]) -> int:
    return max(ranks[-1:] if isinstance(ranks, range) else ranks, default=0)


def bounded(ranks: Iterable[Rank], limit: int) -> tuple[Rank, ...]:
    """Return as many ranks as a message of so many bytes holds.

    The others count as ranks that make progress, too.
    """
    kept, remaining = [], limit
    for rank in ranks:
        # The same each time, however long the number of seconds is.
        size = len(json.dumps(to_wire(rank._replace(unchanged=0)))) + _LONGEST_SECONDS
        if size <= remaining:
            remaining -= size
            kept.append(rank)
    return tuple(kept)
