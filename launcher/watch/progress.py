"""How far ranks are in their collectives: what ranks say of it, and hosts pass on. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

from launcher.text import wire
from launcher.text.wire import Among, Seconds
from launcher.text.words import printable

MOST_GROUPS = 64  # that a rank tells of
_LONGEST_NAME, _LONGEST_RANKS, _LONGEST_NUMBER = 100, 2000, 24
_LONGEST_REST = 300
_MOST_RANKS = 1 << 17
ENDED, ENDS = "has ended with exit code 0", "is about to end"  # a rank's trouble
_SIGNIFICANT = 10**12  # numbers are below


Key = tuple[str, int, bool]


def _text(text: str, limit: int) -> str:
    if len(text) > _LONGEST_RANKS:
        raise ValueError(text)
    return printable(text)[:limit]


def _name(text: str) -> str:
    return _text(text, _LONGEST_NAME)


def _rest(text: str) -> str:
    return _text(text, _LONGEST_REST)


def _ranks(text: str) -> str:
    kept = _text(text, _LONGEST_RANKS)
    members(kept)
    return kept


Number = Annotated[int, Among(range(_SIGNIFICANT))]
Name = Annotated[str, _name]


class Group(NamedTuple):
    """One process group, as one of its ranks sees it.

    `ranks` are written as in_rank.ranges() does, `order` is its place among groups of the same
    ranks. `last` is the number of the last collective that the rank has begun; `waits` that of the
    first which has not ended, 0 if there is none, `op` what it is (`all_reduce`) and `of` its size.
    If what the rank has begun is only counted, as of NCCL, `waits` is `last` if that is known not
    to have ended, and the two others are not known.
    """

    ranks: Annotated[str, _ranks]
    order: Number = 0
    name: Name = ""
    last: Number = 0
    waits: Number = 0
    op: Name = ""
    of: Name = ""
    is_counted: bool = False

    @property
    def key(self) -> Key:
        """What is the same on each of its ranks; torch's names for it may differ."""
        return self.ranks, self.order, self.is_counted

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


class Rank(NamedTuple):
    """One rank of which nothing has moved for `still` seconds.

    `place` is where its main thread is (`load, data.py:88`). `trouble` is why it begins nothing
    any more, if that is known: it has ended, or does not answer. Then its groups are those that it
    told before, if it did. `runs_on` is in what its process runs on though its script has ended, ""
    as long as that runs.
    """

    rank: Number
    local_rank: Number
    still: Seconds
    trouble: Name = ""
    place: Name = ""
    groups: Annotated[tuple[Group, ...], _first] = ()
    runs_on: Annotated[str, _rest] = ""

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
    defaults = Group._field_defaults  # are not sent
    groups = (wire.read(Group, {**defaults, **one}) for one in fields["groups"][:MOST_GROUPS])
    return seconds(fields["still"]), tuple(groups)


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
        size = len(json.dumps(wire.written(rank._replace(still=0)))) + _LONGEST_NUMBER
        if size <= left:
            left -= size
            kept.append(rank)
    return tuple(kept)


def whole(value: Any) -> int:
    """Return a number that was sent. Raises ValueError if it is none."""
    number: int = wire.read(Number, value)
    return number


def seconds(value: Any) -> float:
    """Return a time that was sent. Raises ValueError if it is none."""
    time: float = wire.read(Seconds, value)
    return time
