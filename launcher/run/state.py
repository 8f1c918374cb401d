"""The state of this host's run: its phase, its torchrun, its ranks. Pure.

Times are on the clock System.now(), infinite if unknown; waits in seconds.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Mapping
from typing import NamedTuple, Union

from launcher.job.job import Job
from launcher.result.causes import SUCCESS, Result
from launcher.run.events import Actions
from launcher.run.ranks import Rank


class Why(enum.Enum):
    """Why ranks are ended."""

    SUCCESS = "all ranks of all hosts have succeeded"
    STOP = "the job was stopped"
    FAILURE = "the job has failed"
    RESTART = "all ranks are started again"


# Phases.


class Joining(NamedTuple):
    """This host waits until all hosts have joined; if it cannot start, until it has told them."""


class Running(NamedTuple):
    """Ranks run. torchrun must have started all of them by the deadline."""

    deadline: float = math.inf


class Ending(NamedTuple):
    """All processes of ranks are being ended.

    `end_number` is that of the coordinator's End, LOCAL (machine.py) while there is none;
    `open` are the ranks whose keepers have not cleared; at `deadline` they kill their processes.
    """

    why: Why
    end_number: int
    deadline: float
    open: frozenset[int]
    signal_number: int = signal.SIGTERM  # that ranks get
    survivors: int = 0
    warn_at: float = math.inf  # when to log which ranks still run, and where they are
    leave_by: float = math.inf  # if the others have left without this host: it leaves when clear


class Leaving(NamedTuple):
    """Keepers and torchrun end. At `by` torchrun is killed; then this host gives up the rest."""

    why: Why
    by: float
    is_killed: bool = False  # or it has ended


class Done(NamedTuple):
    """The launcher reports the job's result and ends."""


Phase = Union[Joining, Running, Ending, Leaving, Done]


class Times(NamedTuple):
    """When each part of the job began on this host."""

    began: float
    started: float = math.inf  # torchrun
    attempt_began: float = math.inf
    trains: float = math.inf  # when this attempt's first rank began to run
    closes: float = math.inf  # when ranks were ended


class State(NamedTuple):
    """The state of this host's run."""

    job: Job
    times: Times
    phase: Phase = Joining()
    attempt: int = 0
    nproc: int = 0  # how many ranks torchrun starts here; 0: unknown yet
    ranks: Mapping[int, Rank] = {}  # with connected keepers, and their state in this attempt
    ends: int = 0  # how many EndRanks there were
    port: int = 0  # of this attempt's store, 0 for torchrun's
    torchrun_runs: bool = False
    torchrun_ends: bool = False  # its stubs, as has been reported
    stops: tuple[tuple[int, float], ...] = ()  # that this host itself got: their numbers, and when
    decided: Result | None = None  # how all hosts end, as far as this one knows
    # How this host ends instead of a success: what runs torchrun has failed, or was stopped.
    instead: Result | None = None
    cause: str = ""  # that has been logged

    @property
    def result(self) -> Result | None:
        """How this host ends: as all do, but by `instead`, if it is set, where all succeed."""
        return self.instead if self.instead and self.decided == SUCCESS else self.decided

    @property
    def goes_on(self) -> bool:
        """Whether ranks run, or are about to run again."""
        phase = self.phase
        is_restart = isinstance(phase, Ending) and phase.why is Why.RESTART
        return is_restart or isinstance(phase, Running)

    @property
    def alive(self) -> list[Rank]:
        """The ranks that run."""
        return [rank for rank in self.ranks.values() if rank.runs]

    def grace(self, why: Why) -> float:
        """Return how many seconds a process has to end for this reason."""
        options = self.job.options
        return options.grace if why is Why.STOP else options.failure_grace

    @property
    def has_succeeded(self) -> bool:
        """Whether all ranks of this attempt have ended with 0."""
        all_there = 0 < self.nproc == len(self.ranks)
        return all_there and all(rank.exit_code == 0 for rank in self.ranks.values())


Step = tuple[State, Actions]
