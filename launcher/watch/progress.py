"""How far ranks are in their collectives: what ranks reply, and hosts report. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from launcher.text import wire
from launcher.text.wire import Among, Seconds
from launcher.text.words import printable

MOST_GROUPS = 64  # of a rank's reply
ENDED, ENDS = "has ended with exit code 0", "is about to end"  # a rank's trouble
# In characters.
_LONGEST_NAME, _LONGEST_RANKS, _LONGEST_SECONDS, _LONGEST_RUNS_ON = 100, 2000, 24, 300
_MOST_RANKS = 1 << 17
_ABOVE_NUMBERS = 10**12

Key = tuple[str, int, bool]


def _text(text: str, limit: int) -> str:
    if len(text) > _LONGEST_RANKS:
        raise ValueError(text)
    return printable(text)[:limit]


def _name(text: str) -> str:
    return _text(text, _LONGEST_NAME)


def _runs_on(text: str) -> str:
    return _text(text, _LONGEST_RUNS_ON)


def _ranks(text: str) -> str:
    kept = _text(text, _LONGEST_RANKS)
    members(kept)
    return kept


Number = Annotated[int, Among(range(_ABOVE_NUMBERS))]
Name = Annotated[str, _name]


class Group(NamedTuple):
    """One process group, as one of its ranks sees it.

    `ranks` are written as in_rank.ranges() does, `order` is its place among groups of the same
    ranks. `last` is the number of the last collective that the rank has begun; `waits` that of the
    first which has not ended, 0 if there is none, `op` what it is (`all_reduce`) and `size` its
    input's. If what the rank has begun is only counted, as of NCCL, `waits` is `last` if that is
    known not to have ended, and the two others are not known.
    """

    ranks: Annotated[str, _ranks]
    order: Number = 0
    name: Name = ""
    last: Number = 0
    waits: Number = 0
    op: Name = ""
    size: Name = ""
    is_counted: bool = False

    @property
    def key(self) -> Key:
        """What is the same on each of its ranks; torch's names for it may differ."""
        return self.ranks, self.order, self.is_counted

    @property
    def members(self) -> range | tuple[int, ...]:
        """The numbers of its ranks."""
        return members(self.ranks)

    def short(self) -> list[Any]:
        """Return its fields, but for those at the end that are as by default.

        Of most groups there is little to report: so it is written (wire.py).
        """
        fields = list(self)
        while fields[1:] and fields[-1] == self._field_defaults[self._fields[len(fields) - 1]]:
            fields.pop()
        return fields


def _first(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    return groups[:MOST_GROUPS]


class StalledRank(NamedTuple):
    """One rank that has made no progress for `unchanged` seconds.

    `place` is where its main thread is (`load, data.py:88`). `trouble` is why it begins nothing
    any more, if that is known: it has ended, or does not reply. Then its groups are those of its
    last reply, if there was one. `runs_on` is in what its process runs on though its script has
    ended, "" as long as that runs.
    """

    rank: Number
    local_rank: Number
    unchanged: Seconds
    trouble: Name = ""
    place: Name = ""
    groups: Annotated[tuple[Group, ...], _first] = ()
    runs_on: Annotated[str, _runs_on] = ""

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

    def without_waits(self, trouble: str) -> StalledRank:
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


# What a rank has sent.


def groups_of(values: Sequence[Mapping[str, Any]]) -> tuple[Group, ...]:
    """Return the groups of a reply. Raises one of several errors if they are not valid."""
    defaults = Group._field_defaults  # are not sent
    return tuple(wire.read(Group, {**defaults, **one}) for one in values[:MOST_GROUPS])


def whole(value: Any) -> int:
    """Return a number. Raises ValueError if it is none."""
    number: int = wire.read(Number, value)
    return number


def seconds(value: Any) -> float:
    """Return a time. Raises ValueError if it is none."""
    time: float = wire.read(Seconds, value)
    return time


def within(ranks: Iterable[StalledRank], world: int) -> tuple[StalledRank, ...]:
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


def bounded(ranks: Iterable[StalledRank], limit: int) -> tuple[StalledRank, ...]:
    """Return as many ranks as a message of so many bytes holds.

    The others count as ranks that make progress, too.
    """
    kept, remaining = [], limit
    for rank in ranks:
        # The same each time, however long the number of seconds is.
        size = len(json.dumps(wire.written(rank._replace(unchanged=0)))) + _LONGEST_SECONDS
        if size <= remaining:
            remaining -= size
            kept.append(rank)
    return tuple(kept)
