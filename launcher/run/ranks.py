"""What is known of each rank's process, from what it says and how it ends. Pure."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Union

from launcher.errors import AtSignal
from launcher.result.causes import RankFailure
from launcher.run.events import (
    ExitCodes,
    RankEnded,
    RankFailed,
    RankGone,
    RankIsFinal,
    RankSaid,
    RankStarted,
)

Said = Union[RankStarted, RankSaid, RankIsFinal, RankGone, ExitCodes]
News = Union[RankStarted, RankFailed, RankEnded]


class Rank(NamedTuple):
    """One rank's process.

    `failure` is what it failed with, if it did; `exit_code` how its process ended (negative for a
    signal), or is about to, None until that is known.
    """

    rank: int
    local_rank: int
    pid: int
    restart: int = 0
    max_restarts: int = 0
    runs: bool = True
    failure: RankFailure | None = None
    exit_code: int | None = None
    gone_at: float = math.inf  # seconds since the start, if its exit code could not be seen
    at_stop: AtSignal | None = None  # what it does at the stop; None: none came while it ran


Ranks = Mapping[int, Rank]  # by pid, in the order in which they started


def take_in(ranks: Ranks, said: Said, time: float) -> tuple[Ranks, list[News]]:
    """Return what is known after a report, `time` seconds since the start, and what is new."""
    if isinstance(said, RankStarted):
        return {**ranks, said.pid: Rank(*said[:5])}, [said]
    if isinstance(said, ExitCodes):
        return _exit_codes(ranks, said, time)
    rank = ranks.get(said.pid)
    if rank is None:
        return ranks, []
    if isinstance(said, RankSaid):
        failure = _failure(rank, said.exit_code, time)._replace(chain=said.chain, said=True)
        known = said.exit_code if said.final else rank.exit_code
        rank, news = rank._replace(failure=failure, exit_code=known), [RankFailed(rank.pid)]
        return {**ranks, rank.pid: rank}, list(news)
    if isinstance(said, RankIsFinal):
        if not rank.failure or rank.exit_code is not None:
            return ranks, []
        rank, failed = _with_exit_code(rank, rank.failure.exit_code, time, "")
        return {**ranks, rank.pid: rank}, _news(rank, failed, ended=False)
    rank, failed, ended = _gone(rank, said.exit_code, time, said.oom)
    return {**ranks, rank.pid: rank}, _news(rank, failed, ended=ended)


def latest(ranks: Ranks, local_rank: int) -> Rank | None:
    """Return the process of a local rank that started last."""
    found = None
    for rank in ranks.values():
        if rank.local_rank == local_rank:
            found = rank
    return found


def with_times(failures: Iterable[RankFailure], ranks: Ranks) -> tuple[RankFailure, ...]:
    """Return failures that torchrun named, with the times at which their ranks failed or ended."""
    times = {
        rank.rank: rank.failure.time if rank.failure else rank.gone_at for rank in ranks.values()
    }
    return tuple(one._replace(time=times.get(one.rank, one.time)) for one in failures)


def _news(rank: Rank, failed: bool, *, ended: bool) -> list[News]:
    news: list[News] = [RankFailed(rank.pid)] if failed else []
    return [*news, RankEnded(rank.pid)] if ended else news


def _exit_codes(ranks: Ranks, said: ExitCodes, time: float) -> tuple[Ranks, list[News]]:
    news: list[News] = []
    for local_rank, exit_code in said.codes.items():
        rank = latest(ranks, local_rank)
        if rank:
            rank, failed, ended = _gone(rank, exit_code, time, said.oom)
            ranks = {**ranks, rank.pid: rank}
            news += _news(rank, failed, ended=ended)
    return ranks, news


def _gone(rank: Rank, exit_code: int | None, time: float, oom: str) -> tuple[Rank, bool, bool]:
    """Return a rank whose process has ended, and whether it failed, and ended, only now."""
    ended = rank.runs
    rank = rank._replace(runs=False)
    if exit_code is None:
        return (rank._replace(gone_at=time) if ended else rank), False, ended
    rank, failed = _with_exit_code(rank, exit_code, time, oom)
    return rank, failed, ended


def _with_exit_code(rank: Rank, exit_code: int, time: float, oom: str) -> tuple[Rank, bool]:
    """Return a rank that really ends so, and whether that is news of its failure."""
    if rank.exit_code == exit_code or (rank.exit_code is not None and exit_code < 0):
        return rank, False
    rank = rank._replace(exit_code=exit_code)
    if rank.failure is None:
        if exit_code == 0:
            return rank, False
        oom = oom if exit_code == -signal.SIGKILL else ""
        return rank._replace(failure=_failure(rank, exit_code, time)._replace(oom=oom)), True
    # Said 1, died of a signal: it was killed, or crashed, on its way out (torch's threads make some
    # do that). What it said is the cause, and the code that it would have had.
    if exit_code >= 0:
        rank = rank._replace(failure=rank.failure._replace(exit_code=exit_code))
    return rank, True


def _failure(rank: Rank, exit_code: int, time: float) -> RankFailure:
    return RankFailure(rank.rank, rank.local_rank, exit_code, time=time)
