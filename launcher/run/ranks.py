"""The state of each rank, from its reports and its end. Pure."""

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
_MOST_ENDS = 1000  # of one message, at most
_RELATED_SECONDS = 60  # between a thread's exception and a rank's end that may follow from it
# A rank departs when its script ends, if its process ends within this time; else with its process.
EXIT_SECONDS = 5.0


class Rank(NamedTuple):
    """One rank in an attempt.

    `pid` is the script's process, 0 before its start; `failure` is the rank's failure, if any;
    `exit_code` is that of its process (negative for a signal), None while it runs.
    Times are in seconds since the attempt's start.
    """

    rank: int
    local_rank: int
    pid: int = 0
    failure: RankFailure | None = None
    exit_code: int | None = None
    counts: bool = False  # its failure has been reported to the coordinator
    response: Disposition | None = None  # to the signal that was sent to it; None if none was
    script_ended_at: float = math.inf  # when the script ended by itself
    alone: bool = False  # it has exchanged nothing with other ranks
    ended_at: float = math.inf  # when its process ended
    place: str = ""  # where it was at the last request: `load, data.py:88`
    threads: tuple[tuple[float, ThreadRaised], ...] = ()  # recent exceptions, with times

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self.pid > 0 and self.exit_code is None


Ranks = Mapping[int, Rank]  # by their numbers
NONE: Ranks = {}


def updated(ranks: Ranks, event: RankEvent, time: float) -> Ranks:
    """Return the ranks after an event, `time` seconds since the attempt's start."""
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
    """Return the ranks with the places that they have reported."""
    return {number: rank._replace(place=places.get(number, "")) for number, rank in ranks.items()}


def _with_exit_code(rank: Rank, event: RankEnded, time: float) -> Rank:
    """Return a rank whose process has ended with this exit code."""
    exit_code = event.exit_code
    rank = rank._replace(exit_code=exit_code)
    if rank.failure is None:
        if exit_code == 0:
            return rank
        failure = _failure(rank, event, exit_code, time)
        place, frames = stacks.place(event.calls), stacks.frames_of(event.calls)
        failure = failure._replace(place=place, frames=frames, at=event.at, last_words=event.said)
        return rank._replace(failure=failure)
    # It said 1 and died of a signal: it was killed, or crashed, while it exited (torch's threads
    # cause some such crashes). What it reported stays the cause, with its exit code.
    if exit_code >= 0:
        failure = rank.failure._replace(exit_code=exit_code, last_words=event.said)
        return rank._replace(failure=failure)
    return rank


def succeeded(ranks: Ranks, attempt: int, time: float) -> tuple[RanksSucceeded, ...]:
    """Return the coordinator's message about ranks that have ended with 0; () if none has.

    A rank departed when its script ended, not when Python had finished its exit.
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
    """Return the ranks whose failures count now, first failure first, and when the next one may.

    A failure counts when its rank has ended, or `patience` seconds after the report: until
    then a sys.excepthook may choose another exit code, even 0. A failure waits for an earlier one
    that is not secondary and may still count, so that they are reported in order.
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
    for at, thread in _lately(rank, time)[:1]:  # later ones may follow from it
        aside = Aside(thread.thread, thread.chain, time - at, thread.notes)
        failure = failure._replace(aside=aside, recorded=event.recorded or thread.recorded)
    return failure


def _lately(rank: Rank, time: float) -> tuple[tuple[float, ThreadRaised], ...]:
    return tuple((at, one) for at, one in rank.threads if time - at <= _RELATED_SECONDS)
