"""What is known of each rank, from what it reports and how it ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Union

from launcher.errors import Disposition
from launcher.peers.messages import RanksSucceeded
from launcher.result.causes import Aside, RankFailure
from launcher.run.events import RankEnded, RankExits, RankRuns, ScriptEnded, ThreadRaised
from launcher.watch import stacks

RankEvent = Union[RankRuns, RankExits, ScriptEnded, RankEnded, ThreadRaised]
_MOST_ENDS = 1000  # that one message has
_RELATED_SECONDS = 60  # in which what a thread raised may have to do with the rank's end
EXIT_SECONDS = 5.0  # from a script's end to that of its process, within which the former counts


class Rank(NamedTuple):
    """One rank in an attempt.

    `pid` is the script's process, 0 while it is not started; `failure` is what the rank failed
    with, if it did; `exit_code` how its process ended (negative for a signal), None if it has not.
    Times are in seconds since the attempt's start.
    """

    rank: int
    local_rank: int
    pid: int = 0
    failure: RankFailure | None = None
    exit_code: int | None = None
    counts: bool = False  # its failure has been reported to the coordinator
    response: Disposition | None = None  # to the signal that it was sent; None: none was
    script_ended_at: float = math.inf  # by itself
    alone: bool = False  # it has exchanged nothing with other ranks
    ended_at: float = math.inf  # its process
    place: str = ""  # where it was when that was requested: `load, data.py:88`
    threads: tuple[tuple[float, ThreadRaised], ...] = ()  # what they raised, and when, lately

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self.pid > 0 and self.exit_code is None


Ranks = Mapping[int, Rank]  # by their numbers
NONE: Ranks = {}


def updated(ranks: Ranks, event: RankEvent, time: float) -> Ranks:
    """Return what is known after an event, `time` seconds since the attempt's start."""
    rank = ranks.get(event.rank)
    if rank is None:
        return ranks
    if isinstance(event, RankRuns):
        rank = rank._replace(pid=event.pid)
    elif isinstance(event, ThreadRaised):
        rank = rank._replace(threads=(*_lately(rank, time), (time, event)))
    elif isinstance(event, RankExits):
        failure = _failure(rank, event, event.exit_code, time)
        failure = failure._replace(chain=event.chain, said=True)
        rank = rank._replace(failure=failure)
    elif isinstance(event, ScriptEnded):
        rank = rank._replace(script_ended_at=time, alone=event.alone)
    else:
        rank = _with_exit_code(rank._replace(ended_at=time, response=event.response), event, time)
    return {**ranks, rank.rank: rank}


def placed(ranks: Ranks, places: Mapping[int, str]) -> Ranks:
    """Return what is known of ranks that have reported where they are."""
    return {number: rank._replace(place=places.get(number, "")) for number, rank in ranks.items()}


def _with_exit_code(rank: Rank, event: RankEnded, time: float) -> Rank:
    """Return a rank that really ends so."""
    exit_code = event.exit_code
    rank = rank._replace(exit_code=exit_code)
    if rank.failure is None:
        if exit_code == 0:
            return rank
        failure = _failure(rank, event, exit_code, time)
        place, frames = stacks.place(event.calls), stacks.frames_of(event.calls)
        failure = failure._replace(place=place, frames=frames, at=event.at, last_words=event.said)
        return rank._replace(failure=failure)
    # Said 1, died of a signal: it was killed, or crashed, on its way out (torch's threads make some
    # do that). What it reported is the cause, and the code that it would have had.
    if exit_code >= 0:
        return rank._replace(failure=rank.failure._replace(exit_code=exit_code))
    return rank


def succeeded(ranks: Ranks, attempt: int, time: float) -> tuple[RanksSucceeded, ...]:
    """Return what the coordinator is to know of ranks that have ended with 0; () if none has.

    A rank has departed when its script ended, not when Python was through with its exit.
    """
    ends = []
    for rank in ranks.values():
        if rank.exit_code == 0:
            is_exit = rank.ended_at < rank.script_ended_at + EXIT_SECONDS
            at = min(rank.script_ended_at, rank.ended_at) if is_exit else rank.ended_at
            ends.append((at, rank.rank))
    if not ends:
        return ()
    ages = [round(max(0.0, time - at), 3) for at, _ in sorted(ends)]
    return (RanksSucceeded(attempt, min(ends)[1], tuple(ages[:_MOST_ENDS])),)


def to_count(ranks: Ranks, time: float, patience: float) -> tuple[list[Rank], float]:
    """Return the ranks whose failures count now, the first first, and when the next may.

    A failure counts when its rank has ended, or `patience` seconds after it reported it: until then
    a sys.excepthook may choose another exit code, even 0. A failure waits for an earlier one that
    is not secondary and may still count, so that the first is reported first.
    """
    failed = [(rank.failure.time, rank) for rank in ranks.values() if rank.failure]
    counting: list[Rank] = []
    wait = math.inf
    for at, rank in sorted(failed, key=lambda one: one[0]):
        if rank.counts or rank.exit_code == 0:
            continue
        if rank.exit_code is not None or time >= at + patience:
            counting.append(rank)
            continue
        wait = min(wait, at + patience)
        if rank.failure and not rank.failure.is_secondary:
            break
    return counting, wait


def _failure(rank: Rank, event: RankExits | RankEnded, exit_code: int, time: float) -> RankFailure:
    failure = RankFailure(
        rank.rank,
        rank.local_rank,
        exit_code,
        time=time,
        notes=event.notes,
        recorded=event.recorded,
        after_script=rank.script_ended_at < math.inf,
    )
    for at, thread in _lately(rank, time)[:1]:  # the others may follow from it
        aside = Aside(thread.thread, thread.chain, time - at, thread.notes)
        failure = failure._replace(aside=aside, recorded=event.recorded or thread.recorded)
    return failure


def _lately(rank: Rank, time: float) -> tuple[tuple[float, ThreadRaised], ...]:
    return tuple((at, one) for at, one in rank.threads if time - at <= _RELATED_SECONDS)
