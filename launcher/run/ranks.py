"""What is known of each rank's process, from what it says and how it ends. Pure."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import NamedTuple, Union

from launcher.errors import Disposition
from launcher.result.causes import RankFailure
from launcher.run.events import RankEnded, RankRuns, RankSaid
from launcher.text import plural

Report = Union[RankRuns, RankSaid, RankEnded]


class Rank(NamedTuple):
    """One rank's process.

    `failure` is what it failed with, if it did; `exit_code` how its process ended (negative for a
    signal), None until that is known.
    """

    pid: int
    rank: int
    local_rank: int
    runs: bool = True
    failure: RankFailure | None = None
    exit_code: int | None = None
    counts: bool = False  # its failure has been told to the coordinator
    disposition: Disposition | None = None  # at the signal that it was sent; None: none was
    place: str = ""  # where it was when it was asked: `load, data.py:88`


Ranks = Mapping[int, Rank]  # by pid, in the order in which they became known
NONE: Ranks = {}


def updated(ranks: Ranks, report: Report, time: float) -> Ranks:
    """Return what is known after a report, `time` seconds since torchrun's start."""
    if isinstance(report, RankRuns):
        rank = ranks.get(report.pid) or Rank(*report)
    else:
        known = ranks.get(report.pid)
        if known is None:
            return ranks
        rank = known
    if isinstance(report, RankSaid):
        failure = _failure(rank, report.exit_code, time)._replace(chain=report.chain, said=True)
        rank = rank._replace(failure=failure)
    elif isinstance(report, RankEnded):
        rank = rank._replace(runs=False)
        if report.exit_code is not None and rank.exit_code is None:
            rank = _with_exit_code(rank, report.exit_code, time, report.oom)
    return {**ranks, rank.pid: rank}


def placed(ranks: Ranks, places: Mapping[int, str]) -> Ranks:
    """Return what is known of ranks that have said where they are, by pid."""
    return {pid: one._replace(place=places.get(pid, "")) for pid, one in ranks.items()}


def _with_exit_code(rank: Rank, exit_code: int, time: float, oom: str) -> Rank:
    """Return a rank that really ends so."""
    rank = rank._replace(exit_code=exit_code)
    if rank.failure is None:
        if exit_code == 0:
            return rank
        oom = oom if exit_code == -signal.SIGKILL else ""
        return rank._replace(failure=_failure(rank, exit_code, time)._replace(oom=oom))
    # Said 1, died of a signal: it was killed, or crashed, on its way out (torch's threads make some
    # do that). What it said is the cause, and the code that it would have had.
    if exit_code >= 0:
        return rank._replace(failure=rank.failure._replace(exit_code=exit_code))
    return rank


def passed_on(number: int, count: int, ranks: int) -> str:
    """Return what the log says of an early warning that goes to `count` of the ranks that run."""
    name = signal.Signals(number).name
    if not ranks:
        return f"{name}: no rank runs yet, or any more."
    if not count:
        return f"{name}: passed on to none of {plural(ranks, 'rank')}: none handles it."
    handle = "handles" if count == 1 else "handle"
    return f"{name}: passed on to {count} of {plural(ranks, 'rank')}, which {handle} it."


def to_count(ranks: Ranks, time: float, patience: float) -> tuple[list[Rank], float]:
    """Return the ranks whose failures count now, the first first, and when to look again.

    A failure counts when its rank has ended, or `patience` seconds after it said what it raised:
    until then a sys.excepthook may choose another exit code, even 0. A failure waits for an earlier
    one that is not secondary and may still count, so that the first is told first.
    """
    failed = [(rank.failure.time, rank) for rank in ranks.values() if rank.failure]
    counting: list[Rank] = []
    wait = math.inf
    for at, rank in sorted(failed, key=lambda one: one[0]):
        if rank.counts or rank.exit_code == 0:
            continue
        if rank.exit_code is not None or time >= at + patience:
            # One that torchrun has reaped has not failed, or torchrun would have said so by now.
            if rank.runs or rank.exit_code is not None or patience < 0:
                counting.append(rank)
            continue
        wait = min(wait, at + patience)
        if rank.failure and not rank.failure.is_secondary:
            break
    return counting, wait


def _failure(rank: Rank, exit_code: int, time: float) -> RankFailure:
    return RankFailure(rank.rank, rank.local_rank, exit_code, time=time)
