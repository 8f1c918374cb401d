"""What is known of this host's run: the phase it is in, its torchrun, its ranks. Pure.

Times are on the clock time.monotonic(), infinite if not known; waits in seconds.
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
MARGIN_SECONDS = 5.0  # for what should take a moment
CLOSE_REQUEST_SECONDS = 2.0  # for torchrun, after its last rank's end; and to end after the reply
PLACES_SECONDS = 2.0  # for ranks, before they are killed
GPU_CHECK_SECONDS = 5.0  # for the driver of the GPUs, before a restart
EXIT_BARRIER_SECONDS = 15.0  # for torchrun, once all hosts have succeeded
DEPART_SECONDS = 3.0  # for a host that starts nothing, to report why
PART_OF_STOP_SECONDS = 1.0  # from a foreign signal to torchrun to the stop that it is part of
KILL_AGAIN_SECONDS = 1.0  # until what was killed is killed again
INTERRUPTS_TO_KILL, INTERRUPTS_WITHIN_SECONDS = 3, 2.0  # SIGINTs, within seconds
LAST_INTERRUPT = f"third SIGINT within {INTERRUPTS_WITHIN_SECONDS:g} s"


class Why(enum.Enum):
    """Why processes are being ended."""

    SUCCESS = "all ranks of this host have succeeded"
    STOP = "the job was stopped"
    FAILURE = "the job has failed"
    RESTART = "all ranks are started again"
    INTERRUPT = "the third Ctrl-C"


# Phases.


class Joining(NamedTuple):
    """This host waits until all hosts have joined."""


class Departing(NamedTuple):
    """This host starts nothing, or nothing more; it reports why, for at most 3 s."""

    deadline: float


class Running(NamedTuple):
    """torchrun runs, and starts ranks, which run."""

    foreign_signal: int = 0  # that torchrun got from somebody else, 0 if it did not
    deadline: float = math.inf  # until then that may be part of a stop


class Failing(NamedTuple):
    """This host has failed. The coordinator decides what follows; at the deadline the ranks end.

    Where there can be no better cause they do at once: no decision would let them go on.
    """

    deadline: float
    signalled: frozenset[int] = frozenset()  # ranks that got SIGTERM


class Kill(NamedTuple):
    """What was done with SIGKILL of late, to ranks and to leftover processes."""

    began: float = math.inf  # when the first that may still run was killed
    again_at: float = -math.inf
    leftovers: frozenset[int] = frozenset()  # those that were


class Leftovers(NamedTuple):
    """The processes that ranks have left behind."""

    pids: tuple[int, ...] | None = None  # None: not known yet
    is_said: bool = False  # in the log, that they have time to end


class GpuCheck(NamedTuple):
    """What this host's driver answers about its GPUs before a restart."""

    deadline: float = math.inf  # of the driver's answer; infinite: it was not asked
    broken: str | None = None  # by that answer; None: not known yet

    @property
    def is_open(self) -> bool:
        """Whether the answer is waited for."""
        return self.deadline < math.inf and self.broken is None


class Ending(NamedTuple):
    """Processes are being ended: ranks, leftover processes, torchrun, and what runs it."""

    why: Why
    since: float
    deadline: float  # when ranks and leftover processes are killed
    number: int = signal.SIGTERM  # what ranks get
    signalled: frozenset[int] = frozenset()  # processes that got it
    places_requested: bool = False  # where ranks are
    kill: Kill = Kill()
    no_ranks_since: float = math.inf
    no_ranks_reported: bool = False
    leftovers: Leftovers = Leftovers()
    gpus: GpuCheck = GpuCheck()


class Restarting(NamedTuple):
    """Nothing of the last attempt runs here; the other hosts are waited for."""


class Waiting(NamedTuple):
    """Nothing runs on this host any more; the other hosts go on."""


class Done(NamedTuple):
    """The launcher reports the job's result and ends."""


Phase = Union[Joining, Departing, Running, Failing, Ending, Restarting, Waiting, Done]


class Torchrun(NamedTuple):
    """This attempt's torchrun."""

    runs: bool = False
    has_permission: bool = False  # to start ranks
    nproc: int = 0  # how many ranks it starts
    keeps_store: bool = False
    requests_close: bool = False  # it waits for a reply
    tees: bool = False  # it copies what ranks wrote, which takes a while
    exit_deadline: float = -math.inf  # after that reply, to copy this and to end
    in_barrier: bool = False  # its ranks have succeeded; it waits for other hosts', and for nothing
    barrier_deadline: float = math.inf  # once all hosts have succeeded
    killed_at: float = math.inf
    ended_at: float = math.inf
    child_has_ended: bool = False  # torchrun's process, or that of the program which runs it

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, whoever runs it."""
        return self.ended_at < math.inf

    @property
    def was_killed(self) -> bool:
        """Whether it was sent SIGKILL."""
        return self.killed_at < math.inf

    @property
    def stuck_at(self) -> float:
        """When it has survived SIGKILL for too long."""
        return self.killed_at + MARGIN_SECONDS


class Program(NamedTuple):
    """The program that runs torchrun, where one does."""

    name: str = ""  # "" where torchrun is the launcher's own child
    signalled: bool = False
    killed_at: float = math.inf


class Times(NamedTuple):
    """When the parts of the job began on this host."""

    began: float
    started: float = math.inf  # torchrun
    attempt: float = math.inf  # this attempt's torchrun
    trains: float = math.inf  # since this attempt's first rank runs
    closes: float = math.inf  # when ranks were ended
    ended: float = math.inf


class State(NamedTuple):
    """All that is known of this host's run."""

    job: Job
    times: Times
    program: Program = Program()
    phase: Phase = Joining()
    attempt: int = 0
    ranks: Ranks = NONE  # of this attempt
    torchrun: Torchrun = Torchrun()
    no_ranks_anywhere: bool = False  # of this attempt, on any host
    interrupts: tuple[float, ...] = ()  # when SIGINT came
    was_signalled: bool = False  # this host itself, and not only told of another one's stop
    count_at: float = math.inf  # when a rank's failure may count
    failure: Failure | None = None  # why this host cannot start
    result: Result | None = None  # how all hosts end

    @property
    def alive(self) -> list[Rank]:
        """The ranks that run."""
        return [rank for rank in self.ranks.values() if rank.runs]

    def grace(self, why: Why) -> float:
        """Return how many seconds a process has to end for this reason."""
        return self.job.options.grace if why is Why.STOP else self.job.options.failure_grace

    @property
    def others_are_unheard(self) -> bool:
        """Whether the launchers of several hosts do not talk, but for their torchruns."""
        return self.job.cluster.nnodes > 1 and not self.job.has_peers

    @property
    def is_starting(self) -> bool:
        """Whether torchrun waits for ranks that are not known yet."""
        torchrun = self.torchrun
        return torchrun.has_permission and len(self.ranks) < torchrun.nproc

    @property
    def has_succeeded(self) -> bool:
        """Whether all ranks of this attempt have ended with 0."""
        all_there = 0 < self.torchrun.nproc == len(self.ranks)
        return all_there and all(rank.exit_code == 0 for rank in self.ranks.values())


Step = tuple[State, Actions]
