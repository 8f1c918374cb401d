"""How far ranks are in their collectives: what ranks say of it, and hosts pass on. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from launcher.text.words import printable

MOST_GROUPS = 64  # that a rank tells of
_LONGEST_NAME, _LONGEST_RANKS, _LONGEST_NUMBER = 100, 2000, 24
_LONGEST_REST = 300
_MOST_RANKS = 1 << 17
ENDED, ENDS = "has ended with exit code 0", "is about to end"  # a rank's trouble
_SIGNIFICANT = 10**12  # numbers are below


Key = tuple[str, int, bool]


class Group(NamedTuple):
    """One process group, as one of its ranks sees it.

    `ranks` are written as in_rank.ranges() does, `order` is its place among groups of the same
    ranks. `last` is the number of the last collective that the rank has begun; `waits` that of the
    first which has not ended, 0 if there is none, `op` what it is (`all_reduce`) and `of` its size.
    If what the rank has begun is only counted, as of NCCL, `waits` is `last` if that is known not
    to have ended, and the two others are not known.
    """

    ranks: str
    order: int = 0
    name: str = ""
    last: int = 0
    waits: int = 0
    op: str = ""
    of: str = ""
    is_counted: bool = False

    @property
    def key(self) -> Key:
        """What is the same on each of its ranks; torch's names for it may differ."""
        return self.ranks, self.order, self.is_counted


_NO_GROUP = Group("")


class Rank(NamedTuple):
    """One rank of which nothing has moved for `still` seconds.

    `place` is where its main thread is (`load, data.py:88`). `trouble` is why it begins nothing
    any more, if that is known: it has ended, or does not answer. Then its groups are those that it
    told before, if it did. `runs_on` is in what its process runs on though its script has ended, ""
    as long as that runs.
    """

    rank: int
    local_rank: int
    still: float
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


def members(ranks: str) -> range | tuple[int, ...]:
    """Return the ranks of a text such as `0-7`, `0-56:8` or `0,1,5`.

    Raises ValueError if it is none.
    """
    if "-" not in ranks:
        return tuple(_rank(text) for text in ranks.split(","))
    first, _, rest = ranks.partition("-")
    last, _, step = rest.partition(":")
    return range(_rank(first), _rank(last) + 1, _rank(step or "1"))


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > _MOST_RANKS:
        raise ValueError(text)
    return int(text)


def answer_of(fields: Mapping[str, Any]) -> tuple[float, tuple[Group, ...]]:
    """Return what a rank has answered: seconds without a move, and its groups.

    Raises one of several errors if it is not valid.
    """
    groups = tuple(_group(one) for one in fields["groups"][:MOST_GROUPS])
    return seconds(fields["still"]), groups


def to_wire(rank: Rank) -> Mapping[str, Any]:
    """Return the JSON object of a rank; of most groups there is little to say."""
    return {**rank._asdict(), "groups": [_short(group) for group in rank.groups]}


def _short(group: Group) -> list[Any]:
    """Return a group's fields, but for those at the end that are as by default."""
    fields = list(group)
    while fields[1:] and fields[-1] == _NO_GROUP[len(fields) - 1]:
        fields.pop()
    return fields


def from_wire(fields: Mapping[str, Any]) -> Rank:
    """Return the rank of a JSON object. Raises one of several errors if it is not valid."""
    groups = [_group(dict(zip(Group._fields, one))) for one in fields["groups"][:MOST_GROUPS]]
    return Rank(
        whole(fields["rank"]),
        whole(fields["local_rank"]),
        seconds(fields["still"]),
        _text(fields["trouble"]),
        _text(fields["place"]),
        tuple(groups),
        _text(fields["runs_on"], _LONGEST_REST),
    )


def within(ranks: Iterable[Rank], world: int) -> tuple[Rank, ...]:
    """Return the ranks of which all is said of ranks of a job with so many.

    What is left out counts as a rank that moves: then nothing is said of those that wait for it.
    """
    return tuple(
        one
        for one in ranks
        if one.rank < world and all(_highest(group.ranks) < world for group in one.groups)
    )


def _highest(ranks: str) -> int:
    found = members(ranks)
    return max(found[-1:] if isinstance(found, range) else found, default=0)


def bounded(ranks: Iterable[Rank], limit: int) -> tuple[Rank, ...]:
    """Return as many ranks as a message of so many bytes holds; of the others nothing is said."""
    kept, left = [], limit
    for rank in ranks:
        # The same each time, however long the number of seconds is.
        size = len(json.dumps(to_wire(rank._replace(still=0)))) + _LONGEST_NUMBER
        if size <= left:
            left -= size
            kept.append(rank)
    return tuple(kept)


def _group(fields: Mapping[str, Any]) -> Group:
    group = Group(
        _text(fields["ranks"], _LONGEST_RANKS),
        whole(fields.get("order", 0)),
        _text(fields.get("name", "")),
        whole(fields.get("last", 0)),
        whole(fields.get("waits", 0)),
        _text(fields.get("op", "")),
        _text(fields.get("of", "")),
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
    if type(value) is not int or not 0 <= value < _SIGNIFICANT:
        raise ValueError(value)
    return value


def seconds(value: Any) -> float:
    """Return a time that was sent. Raises ValueError if it is none."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(value)
    return float(value)
