"""Which failure is the cause of a job's end, and with which exit code. Pure."""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Sequence
from typing import NamedTuple

from launcher.result import raised

# Failures within this many seconds happened at once, as far as anybody can tell.
_MOMENT = 1.0


class Cause(enum.IntEnum):
    """What a failure says of why the job ends, the best explanation first."""

    OWN = 0  # a rank failed for a reason of its own, or a host cannot start
    HOST_LOST = 1
    TORCHRUN = 2  # it failed, or was killed
    RESTARTED = 3  # a rank failed, and torchrun restarts it
    ABORTED = 4  # a rank was aborted, or ended by SIGTERM: perhaps because another one had died
    SECONDARY = 5  # a rank said that it heard of another's death

    @property
    def patience(self) -> float:
        """Seconds that the first host waits for a better cause than this one."""
        return _PATIENCE[self]


# Seconds that the first host, and a torchrun, wait for a better cause than the last two.
SECONDARY_PATIENCE = 3.0
_PATIENCE = (0.3, 0.5, 1.0, math.inf, SECONDARY_PATIENCE, SECONDARY_PATIENCE)


class Failure(NamedTuple):
    """One reason for the job to fail: `text` is that of the failure file, its first line the cause.

    `exit_code` is a process's, 1 to 255.
    """

    cause: Cause
    exit_code: int
    text: str

    @property
    def result(self) -> Result:
        """How the job ends if this is the cause."""
        return Result(self.exit_code, self.text)


class Result(NamedTuple):
    """How the job ends, the same on every host; `text` is that of the failure file, "" for none."""

    exit_code: int
    text: str = ""
    stop_signal: int = 0  # what a person or the platform stopped the job with


def stopped(number: int) -> Result:
    """Return the result of a job that was stopped by a signal."""
    return Result(128 + number, "", number)


class RankFailure(NamedTuple):
    """How one rank of this host ended; `exit_code` is negative for a signal.

    `time` is in seconds since torchrun's start, infinite if only torchrun saw it. A rank
    that `said` why it ended raised, or called sys.exit; one that did not was killed, or called
    os._exit. `chain` is what it raised, as raised.read gives it.
    """

    rank: int
    local_rank: int
    exit_code: int
    chain: Sequence[raised.Link] = ()
    time: float = math.inf
    said: bool = False
    oom: str = ""  # whether an out-of-memory kill was recorded, after a SIGKILL

    @property
    def cause(self) -> Cause:
        """What this says of why the job ends: OWN, ABORTED or SECONDARY."""
        if not self.is_secondary:
            return Cause.OWN
        return Cause.SECONDARY if self.said else Cause.ABORTED

    @property
    def is_secondary(self) -> bool:
        """Whether this reads like the consequence of something that failed before.

        NCCL's watchdog aborts a process whose peer has died, and torchrun ends the ranks that it
        cannot go on with by SIGTERM.
        """
        if self.exit_code in (-signal.SIGABRT, -signal.SIGTERM) and not self.said:
            return True
        return raised.is_secondary(self.chain)


def in_order(
    from_ranks: Sequence[RankFailure],
    from_torchrun: Sequence[RankFailure],
    closing: float = math.inf,
) -> tuple[RankFailure, ...]:
    """Return the failures that count, the first cause first.

    `closing` is when torchrun began to end the others, infinite if that is not known.

    What comes from ranks has times. torchrun knows exit codes, but lists the siblings that it ended
    itself as well, and only in the order it looked.
    """
    codes = {failure.rank: failure.exit_code for failure in from_torchrun}
    failures = []
    for failure in from_ranks:
        code = codes.pop(failure.rank, failure.exit_code)
        # A death by signal after it has said why is no better cause (as in run/ranks.py).
        failures.append(failure._replace(exit_code=code) if code > 0 else failure)
    failures += [failure for failure in from_torchrun if failure.rank in codes]
    failures.sort(key=lambda failure: failure.time)
    # torchrun ends the others with SIGTERM at once, with SIGKILL when their grace is over. Only
    # if nothing else is known can such a death be the first cause, or in the same moment.
    ended = (-signal.SIGTERM, -signal.SIGKILL)
    silent = [f for f in failures if f.exit_code not in ended and math.isinf(f.time)]
    if failures and failures[0].exit_code in ended and silent:
        failures.remove(silent[0])
        failures.insert(0, silent[0])
    if not failures:
        return ()
    first = failures[0].time
    moment = -math.inf if math.isinf(first) else first + _MOMENT
    counted = failures[:1] + [
        failure
        for failure in failures[1:]
        if failure.exit_code not in ended
        or failure.time <= closing < math.inf
        or (failure.exit_code == -signal.SIGKILL and failure.time <= moment)
    ]
    better = _better_than(counted[0], counted[1:], moment, closing)
    if better:
        counted.remove(better)
        counted.insert(0, better)
    return tuple(counted)


def _better_than(
    first: RankFailure, later: Sequence[RankFailure], moment: float, closing: float
) -> RankFailure | None:
    """Return which of later failures is a better cause than a secondary one, if any is."""
    if not first.is_secondary:
        return None
    for failure in later:
        untouched = failure.time <= closing < math.inf
        at_once = untouched or failure.time <= moment or math.isinf(failure.time)
        # An exit code that was chosen may be that of a handler for torchrun's SIGTERM.
        original = raised.is_own(failure.chain) or not failure.said or untouched
        if at_once and original and not failure.is_secondary:
            return failure
    if first.said:
        return next((one for one in later if not one.said and one.time <= moment), None)
    return None
