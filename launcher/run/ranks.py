"""The state of each rank, its failure, and its reaction to a stop. Pure."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Union

from launcher.errors import STOPS, Disposition
from launcher.peers.messages import Succeeded
from launcher.result.causes import Aside, Cause, Exit, Failure, cause_of, of_rank
from launcher.run import events
from launcher.text.words import named_rank, plural

RankEvent = Union[
    events.RankRuns, events.RankExits, events.ScriptEnded, events.RankEnded, events.ThreadRaised
]
_RELATED_SECONDS = 60  # between a thread's exception and a rank's end that may follow from it
CONFIRM_SECONDS = 2.5  # from a rank's exception until it counts, if its process does not end first
# If a rank's process ends within this time of its script, the rank departed at the script's end; if
# not, at the process's.
EXIT_SECONDS = 5.0


class Rank(NamedTuple):
    """One rank in an attempt.

    `pid` is the script's process, 0 before its start; `end` is how the rank has said that it fails,
    or how its process has failed; `exit_code` is the process's (negative for a signal), None while
    it runs.
    Times are in seconds since torchrun's start.
    """

    rank: int
    local_rank: int
    pid: int = 0
    end: Exit | None = None
    failed_at: float = math.inf
    exit_code: int | None = None
    is_reported: bool = False  # its failure, to the coordinator
    response: Disposition | None = None  # to the signal that was sent to it; None if none was
    script: events.ScriptEnded | None = None  # its end, by itself
    script_ended_at: float = math.inf
    ended_at: float = math.inf  # when its process ended
    threads: tuple[tuple[float, events.ThreadRaised], ...] = ()  # recent exceptions, with times

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self.pid > 0 and self.exit_code is None


Ranks = Mapping[int, Rank]  # by their numbers


def updated(rank: Rank, event: RankEvent, time: float) -> Rank:
    """Return a rank after an event, `time` seconds since torchrun's start."""
    if isinstance(event, events.RankRuns):
        rank = rank._replace(pid=event.pid)
    elif isinstance(event, events.ThreadRaised):
        rank = rank._replace(threads=(*_lately(rank, time), (time, event)))
    elif isinstance(event, events.RankExits):
        rank = rank._replace(end=event.end, failed_at=time)
    elif isinstance(event, events.ScriptEnded):
        rank = rank._replace(script=event, script_ended_at=time)
    else:
        exit_code = event.end.exit_code
        rank = rank._replace(exit_code=exit_code, response=event.response, ended_at=time)
        if rank.end is None and exit_code:
            rank = rank._replace(end=event.end, failed_at=time)
        # If it said 1 and died of a signal, it was killed, or crashed, while it exited (torch's
        # threads cause some such crashes): what it reported stays the cause, with its exit code.
        elif rank.end and exit_code >= 0:
            end = rank.end._replace(exit_code=exit_code, words=event.end.words)
            rank = rank._replace(end=end)
    return rank


def succeeded(ranks: Ranks, rank: Rank, *, are_all: bool) -> Succeeded:
    """Return the message to the coordinator about a rank that has just ended with 0.

    It departed when its script ended, unless its exit took longer than EXIT_SECONDS.
    """
    ran_on = rank.ended_at - rank.script_ended_at
    age = round(ran_on, 3) if 0 <= ran_on < EXIT_SECONDS else 0.0
    were_isolated = are_all and all(one.script and one.script.isolated for one in ranks.values())
    return Succeeded(rank.rank, age, are_all, len(ranks) if were_isolated else 0)


def to_count(ranks: Ranks, time: float) -> tuple[list[Rank], float]:
    """Return the ranks whose failures count now, first failure first, and when the next one may.

    A failure counts when its rank has ended, or CONFIRM_SECONDS after the report: until then a
    sys.excepthook may choose another exit code, even 0. A failure waits for an earlier one
    of the cause OWN that may still count, so that they are reported in order.
    """
    failed = [rank for rank in ranks.values() if rank.end and not rank.is_reported]
    counting, wait = list[Rank](), math.inf
    for rank in sorted(failed, key=lambda rank: rank.failed_at):
        by = rank.failed_at + CONFIRM_SECONDS
        if rank.exit_code == 0:
            continue
        if rank.exit_code is not None or time >= by:
            counting.append(rank)
            continue
        wait = min(wait, by)
        if rank.end and cause_of(rank.end) is Cause.OWN:
            break
    return counting, wait


def failure(rank: Rank, host: str) -> Failure:
    """Return the failure of a rank that has failed."""
    assert rank.end
    at, aside = rank.failed_at, None
    for since, thread in _lately(rank, at)[:1]:  # later ones may follow from it
        aside = Aside(thread.thread, thread.end, at - since)
    end = rank.end._replace(after_script=rank.script_ended_at <= at)
    return of_rank(named_rank(host, rank.rank, rank.local_rank), rank.rank, end, at, aside)


def _lately(rank: Rank, time: float) -> tuple[tuple[float, events.ThreadRaised], ...]:
    return tuple(one for one in rank.threads if 0 <= time - one[0] <= _RELATED_SECONDS)


# How ranks reacted to a stop; `number` is its signal's. Only scripts know what they have saved.


def got_signal(ranks: Iterable[Rank]) -> list[Rank]:
    """Return the ranks that got the signal while they ran."""
    return [rank for rank in ranks if rank.response is not None]


def died_of_stop(rank: Rank, number: int) -> bool:
    """Whether it is sure that a rank died of the stop, and did nothing before."""
    return rank.response is Disposition.DEFAULT and rank.exit_code == -number


def has_handled(rank: Rank, number: int) -> bool:
    """Whether a rank has handled the stop, and ended by itself.

    A rank may save and then end itself by the signal; but an uncaught SIGINT ends Python the same
    way.
    """
    if rank.response is not Disposition.HANDLES or rank.exit_code == -signal.SIGINT:
        return False
    return is_end_of_stop(rank.exit_code, number)


def is_end_of_stop(exit_code: int | None, number: int) -> bool:
    """Whether a rank with this exit code was stopped, and did not fail by itself.

    A restart's SIGTERM may have come just before the stop.
    """
    return exit_code in (0, -number, 128 + number, -signal.SIGTERM, 128 + signal.SIGTERM)


def may_follow_stop(event: Any) -> bool:
    """Whether an event may follow from a stop of all processes that this launcher has not read yet.

    Torchrun tells its stubs to end at a stop, and ranks end.
    """
    if isinstance(event, events.RankEnded):
        return any(is_end_of_stop(event.end.exit_code, number) for number in STOPS)
    return isinstance(event, events.StubSignalled)


def failed_before(ended: Iterable[Rank], number: int, host: str) -> list[str]:
    """Return the line about ranks that failed by themselves before a stop arrived, if any did.

    Not ranks that got the stopper's signal, too, nor consequences of other ranks' ends.
    """
    failed = [
        rank
        for rank in ended
        if rank.end
        and cause_of(rank.end) is Cause.OWN
        and not (rank.exit_code is None or is_end_of_stop(rank.exit_code, number))
    ]
    if not failed:
        return []
    first, *others = sorted(failed, key=lambda rank: rank.failed_at)
    more = f", and {plural(len(others), 'rank')} more" if others else ""
    return [f"before the stop: {failure(first, host).headline}{more}."]
