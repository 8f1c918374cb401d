"""What is known of this host's run: the phase it is in, its torchrun, its ranks. Pure.

Times are on the clock System.now(), infinite if not known; waits in seconds.
"""

from __future__ import annotations

import enum
import math
import signal
from typing import NamedTuple, Union

from launcher.job.job import Job
from launcher.result.causes import Failure, Result
from launcher.run.events import Actions
from launcher.run.ranks import NONE, Rank, Ranks

# All in seconds.
CONFIRM_FAILURE_SECONDS = 2.5  # from what a rank raised to its end: then its failure counts
PLACES_SECONDS = 2.0  # for ranks to say where they are, before they are killed
SAYS_SECONDS = 0.1  # before ranks are killed the log says it
UNHEARD_SECONDS = 5.0  # for a host that cannot start to tell the others why
TORCHRUN_SECONDS = 15.0  # for torchrun to end after a success
GONE_SECONDS = 5.0  # for what was killed to be gone
INTERRUPTS_TO_KILL, INTERRUPTS_WITHIN_SECONDS = 3, 2.0  # SIGINTs, within seconds
LAST_INTERRUPT = f"third SIGINT within {INTERRUPTS_WITHIN_SECONDS:g} s"


class Why(enum.Enum):
    """Why ranks are ended."""

    SUCCESS = "all ranks of all hosts have succeeded"
    STOP = "the job was stopped"
    FAILURE = "the job has failed"
    RESTART = "all ranks are started again"
    INTERRUPT = "the third Ctrl-C"


# Phases.


class Joining(NamedTuple):
    """This host waits until all hosts have joined, or, if it cannot start, until they know why."""

    deadline: float = math.inf


class Running(NamedTuple):
    """Ranks run. By the deadline torchrun has started all of them."""

    deadline: float = math.inf


class Ending(NamedTuple):
    """All that ranks have started is ended; then torchrun ends.

    `command` is the number of the coordinator's End, -1 while this host alone knows of it; `open`
    are the ranks whose keepers have not cleared; at `deadline` they kill what runs.
    """

    why: Why
    command: int
    deadline: float
    open: frozenset[int]
    number: int = signal.SIGTERM  # of the signal that ranks get
    survivors: int = 0
    places_at: float = math.inf  # when ranks are requested to say where they are
    says_at: float = math.inf  # when the log says that they are killed
    may_leave: bool = False  # when it has cleared: the others have left without it
    leaves: bool = False  # the coordinator has said that this host may leave
    killed: bool = False  # torchrun
    torchrun_by: float = math.inf  # when torchrun is killed
    gone_by: float = math.inf  # when nothing is waited for any more


class Done(NamedTuple):
    """The launcher reports the job's result and ends."""


Phase = Union[Joining, Running, Ending, Done]


class Times(NamedTuple):
    """When the parts of the job began on this host."""

    began: float
    started: float = math.inf  # torchrun
    attempt: float = math.inf  # this attempt
    trains: float = math.inf  # since this attempt's first rank runs
    closes: float = math.inf  # when ranks were ended
    ended: float = math.inf


class State(NamedTuple):
    """All that is known of this host's run."""

    job: Job
    times: Times
    phase: Phase = Joining()
    attempt: int = 0
    nproc: int = 0  # how many ranks torchrun starts here; 0: not known yet
    ranks: Ranks = NONE  # whose keepers are there, with what is known of this attempt
    ends: int = 0  # how many EndRanks there were
    port: int = 0  # of this attempt's store, 0 for torchrun's
    torchrun_runs: bool = False
    interrupts: tuple[float, ...] = ()  # when SIGINT came
    was_signalled: bool = False  # this host itself, and not only told of another one's stop
    count_at: float = math.inf  # when a rank's failure may count
    failure: Failure | None = None  # why it cannot start, or the program that runs torchrun failed
    result: Result | None = None  # how all hosts end
    cause: str = ""  # as the log has it already

    @property
    def alive(self) -> list[Rank]:
        """The ranks that run."""
        return [rank for rank in self.ranks.values() if rank.runs]

    def grace(self, why: Why) -> float:
        """Return how many seconds a process has to end for this reason."""
        options = self.job.options
        if why is Why.INTERRUPT:
            return 0.0
        return options.grace if why is Why.STOP else options.failure_grace

    @property
    def has_succeeded(self) -> bool:
        """Whether all ranks of this attempt have ended with 0."""
        all_there = 0 < self.nproc == len(self.ranks)
        return all_there and all(rank.exit_code == 0 for rank in self.ranks.values())


Step = tuple[State, Actions]
