"""Log lines about ranks without progress: stalls in words. Pure."""

from __future__ import annotations

import re

from launcher.text.words import all_ranks, join_and_count, lasted, named_rank, plural, printable
from launcher.watch.progress import Group
from launcher.watch.waits import Stall

_MOST_NAMED = 4  # ranks
_LONGEST_RANKS = 40  # characters
_LOCK_FILE = re.compile(r"(?i)baton|file_?lock|lock_?file|\bflock")
# In these each rank's input has the same size; a root's, or a share's, may have another.
_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base")


def line(stall: Stall, now: float, logged: str = "") -> str:
    """Return the line of a stall: how long it has lasted, and why, unless that is `logged`."""
    why = reason(stall, now)
    if not stall.waits:
        return f"{why}."
    lasting = f"ranks have made no progress for {lasted(now - stall.since)}"
    return f"{lasting}, for the same reason." if why == logged else f"{lasting}: {why}."


def progress(stall: Stall) -> str:
    """Return that a stall has ended."""
    return f"ranks are making progress again after {lasted(stall.progress_at - stall.since)}."


def nothing_exchanged(count: int) -> str:
    """Return the line about ranks that did not work together, as far as torch knows.

    They may have by other ways: a store of the script's, files, sockets.
    """
    return (
        f"{count} ranks ran, and none exchanged anything with another in a process group. If they "
        "were to work together: torchrun passes no --local_rank; RANK, WORLD_SIZE and LOCAL_RANK "
        "are in the environment (--launcher-notes false turns this line off)."
    )


def reason(stall: Stall, now: float) -> str:
    """Return why ranks wait, or where idle ranks are."""
    if not stall.waits:
        why = _idle(stall, now)
    elif stall.is_circle:
        why = _circle(stall)
    else:
        why = (_absent if stall.root else _incomplete)(stall)
    notes = [rank.note for _, rank in sorted(stall.ranks.items()) if rank.note]
    return printable("; ".join([why, *notes[:1]]))


def _idle(stall: Stall, now: float) -> str:
    """Return where ranks are that run on after their scripts, or stand still."""
    first = stall.ranks[stall.root[0]]
    number, place, more = first.rank, first.place, len(stall.root) - 1
    others = f"; the same applies to {plural(more, 'more rank')}" if more else ""
    if stall.runs_on:
        who = f"rank {number}'s script has ended, but its process is still running"
        return f"{who}: {place}{others}"
    hint = " (a lock file of a run that was killed?)" if _LOCK_FILE.search(place) else ""
    lasting = f"for {lasted(now - first.since)}{hint}"
    return f"rank {number} has begun no collective: it is in {place}, {lasting}{others}"


def _absent(stall: Stall) -> str:
    wait, root = stall.waits[0], [stall.ranks[rank] for rank in stall.root]
    first, is_alone = root[0], len(root) == 1
    some = [named_rank(one.host, one.rank, one.local_rank) for one in root[:_MOST_NAMED]]
    count, have = len(wait.waiting), "has" if is_alone else "have"
    others = f"where {plural(count, 'other')} {'is' if count == 1 else 'are'} waiting"
    if wait.group.is_making:
        how = f"{have} not joined {_collective(wait.group)}"
    elif not wait.group.is_counted:
        how = f"{'is' if is_alone else 'are'} absent from {_collective(wait.group)}"
    elif first.trouble:  # it may have begun as much as the others
        how = "no longer takes part" if is_alone else "no longer take part"
        last = f"#{wait.group.last} of {_name(wait.group)}"
        others = f"and no rank has begun a collective after {last}"
    else:
        how = f"{have} not begun {_collective(wait.group)}"
        others = f"which {plural(count, 'rank')} {'has' if count == 1 else 'have'}"
    state = first.trouble or (first.place and not first.runs_on and f"is in {first.place}")
    at = f"; rank {first.rank} {state}" if state else ""
    return f"{join_and_count(some, len(root) - len(some))} {how}, {others}{at}"


def _incomplete(stall: Stall) -> str:
    wait = stall.waits[0]
    count, size = len(wait.waiting), len(wait.group.members)
    some = f"{plural(count, 'rank')} {'is' if count == 1 else 'are'}"
    who = f"{all_ranks(size)} are" if count == size else some
    incomplete = f"{who} in {_collective(wait.group)}, which has not completed"
    members = [stall.ranks[rank] for rank in sorted(wait.members)]
    states = [f"; rank {one.rank} {one.trouble}" for one in members if one.trouble]
    return "".join([different_calls(stall) or incomplete, *states[:1]])


def different_calls(stall: Stall) -> str:
    """Return who is in which operation, with its size if sizes must agree; "" if all are in one.

    If one that waits for a collective is already in the next, the first may differ in its size.
    """
    wait, calls, numbers = stall.waits[0], dict[str, list[int]](), set[int]()
    for rank in wait.waiting:
        for view in stall.ranks[rank].groups:
            if view.key == wait.group.key and view.waits and not view.is_counted:
                size = f" ({view.size})" if view.size and view.op in _SAME_SIZE else ""
                calls.setdefault(f"{view.op} #{view.waits}{size}", []).append(rank)
                numbers.add(view.waits)
    parts = []
    for call, those in sorted(calls.items(), key=lambda one: (len(one[1]), one[1])):
        who = f"rank {those[0]} is" if len(those) == 1 else f"{len(those)} ranks are"
        parts.append(f"{who} in {call}")
    why = ": all ranks must make the same call"
    if len(numbers) > 1:
        why = ", which have not completed"
    some = ", ".join(parts[:_MOST_NAMED])
    return f"{some} of {_name(wait.group)}{why}" if len(parts) > 1 else ""


def _circle(stall: Stall) -> str:
    pairs = list(zip(stall.root, stall.waits))[:_MOST_NAMED]
    where = [f"rank {rank} in {_collective(wait.group)}" for rank, wait in pairs]
    more = len(stall.root) - len(where)
    return f"ranks are waiting for each other: {join_and_count(where, more)}"


def _collective(group: Group) -> str:
    if group.is_making:
        return f"{group.op} of ranks {_short(group.ranks)}"
    return f"{group.op or 'collective'} #{group.waits} of {_name(group)}"


def _name(group: Group) -> str:
    if group.name == "default_pg":
        return "the default group"
    return f"group {group.name or group.order + 1} of ranks {_short(group.ranks)}"


def _short(ranks: str) -> str:
    return f"{ranks[: _LONGEST_RANKS - 3]}..." if len(ranks) > _LONGEST_RANKS else ranks
