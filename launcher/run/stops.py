"""How ranks reacted to a stop: which died of it, handled it, or had failed before. Pure.

`number` is the stop signal's. Only its script knows what a rank has saved.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

from launcher.errors import STOPS, Disposition
from launcher.result.causes import Cause, cause_of
from launcher.run.events import RankEnded, StubSignalled
from launcher.run.ranks import Rank, failure
from launcher.text.words import plural


def reached(ranks: Iterable[Rank]) -> list[Rank]:
    """Return the ranks that got the signal while they ran."""
    return [rank for rank in ranks if rank.response is not None]


def died(rank: Rank, number: int) -> bool:
    """Whether it is sure that a rank died of the stop, and did nothing before."""
    return rank.response is Disposition.DEFAULT and rank.exit_code == -number


def has_handled(rank: Rank, number: int) -> bool:
    """Whether a rank has handled the stop, and ended by itself.

    A rank may save and then end itself by the signal; but an uncaught SIGINT ends Python the same
    way.
    """
    codes = _ends_of_handled(number)
    if number != signal.SIGINT:
        codes += (-number,)
    return rank.response is Disposition.HANDLES and rank.exit_code in codes


def _ends_of_handled(number: int) -> tuple[int, ...]:
    """Return the exit codes of a stop, or of a restart's SIGTERM just before, that was handled."""
    return (0, 128 + number, 128 + signal.SIGTERM)


def is_end_of_stop(exit_code: int | None, number: int) -> bool:
    """Whether a rank with this exit code was stopped, and did not fail by itself."""
    return exit_code in (-number, -signal.SIGTERM, *_ends_of_handled(number))


def may_follow(event: Any) -> bool:
    """Whether an event may follow from a stop of all processes that this launcher has not read yet.

    Torchrun tells its stubs to end at a stop, and ranks end.
    """
    if isinstance(event, RankEnded):
        return any(is_end_of_stop(event.end.exit_code, number) for number in STOPS)
    return isinstance(event, StubSignalled)


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
