"""Who waits for whom: what is said of ranks of which nothing moves. Pure.

A rank waits in the first collective that it has begun and that has not ended. What all its group's
ranks have begun, none of them is absent from; GPUs may still be behind. So ranks belong together
that are members of a group in which one of them waits, and nothing is said of them while one of
them moves: it may come yet. A rank that says nothing more still waits where others are absent;
elsewhere it may have gone on.

Where what ranks have begun is only counted, as of NCCL, those that are ahead of others count as
waiting, in the first collective that not all have begun; but if those behind wait in their last
one, that is it. If all are equal, nothing is known to wait, unless a member does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.text.words import join_and_count, plural
from launcher.watch.progress import MOST_GROUPS, Group, Key, Rank, members

_NAMED = 4  # ranks that one sentence names
# Of these each rank's input has the same size; a root's, or a share's, may have another.
_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base")


class Seen(NamedTuple):
    """A rank of which nothing has moved since a time, and its host."""

    host: str
    rank: Rank
    since: float


class Finding(NamedTuple):
    """Ranks that wait, and why, in words; nothing of theirs has moved since a time.

    `named` are the ranks that the others wait for, if there are some; `groups` are those of each
    rank, which tell one stall from the next. Unless it `is_sure` that somebody still waits, nothing
    is said and nothing is ended.
    """

    ranks: frozenset[int]
    named: tuple[int, ...]
    what: str
    since: float
    groups: Mapping[int, Sequence[Group]] = {}
    is_sure: bool = True

    def is_of(self, earlier: Finding) -> bool:
        """Tell whether this is of a stall that was found before, and of which more is seen now."""
        both = self.ranks & earlier.ranks
        # The groups of a rank that did not answer may not have been known.
        return bool(both) and all(earlier.groups[one] in ((), self.groups[one]) for one in both)


class _Wait(NamedTuple):
    """A collective in which ranks wait."""

    group: Group  # as one of those sees it
    waiting: tuple[int, ...]
    absent: tuple[int, ...]  # that have not begun it
    is_sure: bool = True  # that somebody waits


def findings(seen: Mapping[int, Seen]) -> list[Finding]:
    """Return what is known of all ranks that wait and of which none moves, by rank.

    `seen` has the ranks of which nothing moves, by number; every other one does.
    """
    found = []
    for ranks, waits in _together(_waits(seen)):
        if all(rank in seen for rank in ranks):
            since = max(seen[rank].since for rank in ranks)
            groups = {rank: seen[rank].rank.groups for rank in ranks}
            is_sure = any(wait.is_sure for wait in waits)
            found.append(Finding(ranks, *_why(waits, seen), since, groups, is_sure))
    return found


def _waits(seen: Mapping[int, Seen]) -> list[_Wait]:
    """Return each collective in which somebody waits, the one with the most waiting ranks first."""
    begun = {
        number: {group.key: group.last for group in one.rank.groups} for number, one in seen.items()
    }
    waiting: dict[tuple[Key, int], list[int]] = {}
    groups: dict[tuple[Key, int], Group] = {}
    for number, one in sorted(seen.items()):
        for group in one.rank.groups:
            if group.waits and not group.is_counted:
                what = group.key, group.waits
                groups.setdefault(what, group)
                waiting.setdefault(what, []).append(number)
    found = []
    for (key, number), ranks in waiting.items():
        group = groups[key, number]
        absent = [one for one in members(group.ranks) if not _has_begun(begun, one, key, number)]
        answer = [rank for rank in ranks if not seen[rank].rank.trouble]
        ranks = ranks if absent else answer
        if ranks:
            # If none of them answers, all may have gone on.
            found.append(_Wait(group, tuple(ranks), tuple(absent), bool(answer)))
    found += _counted_waits(seen)
    return sorted(found, key=lambda wait: (-len(wait.waiting), wait.group))


def _counted_waits(seen: Mapping[int, Seen]) -> list[_Wait]:
    """Return the waits in groups of which is only counted what ranks have begun."""
    counts: dict[Key, dict[int, Group]] = {}
    for number, one in sorted(seen.items()):
        for group in one.rank.groups:
            if group.is_counted and not one.rank.trouble:
                counts.setdefault(group.key, {})[number] = group
    return [wait for groups in counts.values() for wait in _waits_in(groups, seen)]


def _waits_in(groups: Mapping[int, Group], seen: Mapping[int, Seen]) -> list[_Wait]:
    """Return the waits in one such group, as its ranks see it."""
    group = max(groups.values(), key=lambda one: one.last)
    least = min(one.last for one in groups.values())
    is_behind = least < group.last
    quiet = [rank for rank in members(group.ranks) if rank in seen and rank not in groups]
    quiet = [rank for rank in quiet if _may_be_behind(seen[rank].rank, group, is_behind)]
    if quiet and group.last:
        # How far these are is not known; those that have ended may have done all there was.
        is_sure = is_behind or not all(seen[rank].rank.has_ended for rank in quiet)
        return [_Wait(group._replace(waits=group.last), tuple(groups), tuple(quiet), is_sure)]
    found = []
    waiting = [rank for rank, one in groups.items() if one.waits]
    absent = [rank for rank, one in groups.items() if one.last == least and not one.waits]
    if is_behind and absent:
        ahead = [rank for rank, one in groups.items() if one.last > least]
        found.append(_Wait(group._replace(waits=least + 1), tuple(ahead), tuple(absent)))
        waiting = [rank for rank in waiting if rank not in ahead]
    if waiting and all(rank in groups or rank not in seen for rank in members(group.ranks)):
        # In what all have begun of which nothing moves.
        found.append(_Wait(group._replace(waits=least), tuple(waiting), ()))
    return found


def _may_be_behind(quiet: Rank, group: Group, others_are: bool) -> bool:
    """Tell whether the others may wait for a rank that says nothing more."""
    if not quiet.trouble:
        return False
    told = max((one.last for one in quiet.groups if one.key == group.key), default=0)
    return told < group.last or not (others_are or quiet.has_ended)


def _has_begun(begun: Mapping[int, Mapping[Key, int]], rank: int, key: Key, number: int) -> bool:
    """Tell whether a rank has begun a collective, or that is not known: nothing is said of it."""
    if rank not in begun:
        return True  # it moves
    if len(begun[rank]) >= MOST_GROUPS and key not in begun[rank]:
        return True  # it did not tell of all of its groups
    return begun[rank].get(key, 0) >= number


def _together(waits: Sequence[_Wait]) -> list[tuple[frozenset[int], list[_Wait]]]:
    """Return ranks that belong together, members of groups in which ranks wait, and their waits."""
    of_rank: dict[int, set[int]] = {}
    for wait in waits:
        joined = {*members(wait.group.ranks), *wait.waiting}
        parts = {id(of_rank[rank]): of_rank[rank] for rank in joined if rank in of_rank}
        largest = max((joined, *parts.values()), key=len)
        for part in (joined, *parts.values()):
            if part is not largest:
                largest |= part
                of_rank.update(dict.fromkeys(part, largest))
        of_rank.update(dict.fromkeys(joined, largest))
    found: dict[int, tuple[frozenset[int], list[_Wait]]] = {}
    for wait in waits:
        ranks = of_rank[wait.waiting[0]]
        found.setdefault(id(ranks), (frozenset(ranks), []))[1].append(wait)
    return list(found.values())


def _why(waits: Sequence[_Wait], seen: Mapping[int, Seen]) -> tuple[tuple[int, ...], str]:
    """Return which ranks the others wait for, and the sentence that says it."""
    busy = {rank for wait in waits for rank in wait.waiting}
    # Ranks that nobody blocks; of one that says nothing more, another may be the reason.
    for silent in (False, True):
        for wait in waits:
            free = [rank for rank in wait.absent if rank not in busy]
            free = [rank for rank in free if silent or not seen[rank].rank.trouble]
            if free:
                return tuple(free), _absent(wait, free, seen)
    for wait in waits:
        if not wait.absent:
            return (), _does_not_end(wait, seen)
    # Not those that nobody waits for.
    blocked = sorted(busy & {rank for wait in waits for rank in wait.absent})
    where = [_is_in(rank, waits) for rank in blocked[:_NAMED]]
    more = len(blocked) - len(where)
    return tuple(blocked), f"ranks wait for each other: {join_and_count(where, more)}"


def _absent(wait: _Wait, free: Sequence[int], seen: Mapping[int, Seen]) -> str:
    some = [_rank(seen[rank]) for rank in free[:_NAMED]]
    named, is_one = join_and_count(some, len(free) - len(some)), len(free) == 1
    who = plural(len(wait.waiting), "rank")
    first = seen[free[0]].rank
    if wait.group.is_counted and first.trouble:
        state = first.trouble if is_one else f"say nothing more: rank {first.rank} {first.trouble}"
        last = f"in {_name(wait.group)} nobody has begun a collective after #{wait.group.waits}"
        return f"{named} {state}; {last}"
    state = first.trouble or (f"is in {first.place}" if first.place else "")
    state = state and f"; {'it' if is_one else f'rank {first.rank}'} {state}"
    what, is_alone = _collective(wait.group), len(wait.waiting) == 1
    if wait.group.is_counted:
        what += f", which {who} {'has' if is_alone else 'have'}"
        return f"{named} {'has' if is_one else 'have'} not begun {what}{state}"
    what += f", where {who} {'waits' if is_alone else 'wait'}"
    return f"{named} {'is' if is_one else 'are'} absent from {what}{state}"


def _does_not_end(wait: _Wait, seen: Mapping[int, Seen]) -> str:
    """Return what is said when all ranks of a group have begun a collective that does not end."""
    in_it, all_ranks = len(wait.waiting), len(members(wait.group.ranks))
    if wait.group.is_counted:
        some = "" if in_it == all_ranks else f" on {in_it} of them"
        what = f"have begun {_collective(wait.group)}, which does not complete"
        return f"all {all_ranks} ranks {what}{some}"
    begun: dict[tuple[str, str], list[int]] = {}
    for rank in wait.waiting:
        for group in seen[rank].rank.groups:
            if (group.key, group.waits) == (wait.group.key, wait.group.waits):
                of = group.of if group.op in _SAME_SIZE else ""
                begun.setdefault((group.op, of), []).append(rank)
    if len(begun) == 1:
        who = f"all {in_it} ranks are" if in_it == all_ranks else f"{plural(in_it, 'rank')} of "
        if in_it != all_ranks:
            who += f"{all_ranks} are" if in_it > 1 else f"{all_ranks} is"
        return f"{who} in {_collective(wait.group)}, which does not complete"
    by_count = sorted(begun.items(), key=lambda one: (len(one[1]), one[1]))
    parts = []
    for (op, of), ranks in by_count[:_NAMED]:
        who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"{len(ranks)} ranks are"
        parts.append(f"{who} in {op} #{wait.group.waits}" + (f" ({of})" if of else ""))
    return f"{', '.join(parts)} of {_name(wait.group)}: they must call the same"


def _is_in(rank: int, waits: Sequence[_Wait]) -> str:
    for wait in waits:
        if rank in wait.waiting:
            return f"rank {rank} in {_collective(wait.group)}"
    return f"rank {rank}"


def _collective(group: Group) -> str:
    return f"{group.op or 'collective'} #{group.waits} of {_name(group)}"


def _name(group: Group) -> str:
    if group.name == "default_pg":
        return "the default group"
    ranks = group.ranks if len(group.ranks) <= 40 else f"{group.ranks[:37]}..."
    if group.name:
        return f"group {group.name} (ranks {ranks})"
    return (
        f"group {group.order + 1} of ranks {ranks}"
        if group.order
        else f"the group of ranks {ranks}"
    )


def _rank(seen: Seen) -> str:
    return f"{seen.host}, rank {seen.rank.rank} (local rank {seen.rank.local_rank})"
