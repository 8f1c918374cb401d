"""What happens to this host's torchrun and ranks, and what can be done about it.

Events come from the supervisor (supervisor.py), which carries the actions out. Those that both
state machines of a host share are in launcher/events.py.
"""

import enum
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from launcher.errors import AtSignal
from launcher.result.causes import Failure, RankFailure
from launcher.result.raised import Link


class Why(str, enum.Enum):
    """Why torchrun is about to end its ranks."""

    STOP = "stop"  # it was told to
    FAILURE = "failure"  # a rank has failed
    RESTART = "restart"  # it restarts them
    ERROR = "error"  # it cannot go on: it has lost its store, for one


# Events: before torchrun runs.


class CannotStart(NamedTuple):
    """This host cannot start its torchrun: a configuration error."""

    failure: Failure


class Signal(NamedTuple):
    """The launcher was sent a signal that stops a job."""

    number: int


# Events: what ranks and torchrun say (reports.py).


class RankStarted(NamedTuple):
    """A rank's process runs."""

    rank: int
    local_rank: int
    pid: int
    restart: int  # 0: its first attempt
    max_restarts: int


class RankSaid(NamedTuple):
    """A rank said why it ends; `final`: nothing can change its exit code any more."""

    pid: int
    exit_code: int  # negative: by this signal
    chain: Sequence[Link]  # what it raised, as raised.read gives it
    final: bool


class RankIsFinal(NamedTuple):
    """A rank that has said why it ends will end with the exit code that it said."""

    pid: int


class RankGone(NamedTuple):
    """A rank's process has ended; its exit code is None if torchrun alone knows it."""

    pid: int
    exit_code: Optional[int]
    oom: str = ""  # whether an out-of-memory kill was recorded, after a SIGKILL


class ExitCodes(NamedTuple):
    """How the processes of ranks ended that torchrun has reaped, by local rank."""

    codes: Mapping[int, int]
    oom: str = ""


class TorchrunAsks(NamedTuple):
    """Torchrun is about to end the ranks, and waits for the action Answer."""

    why: Why
    error: str = ""  # what it raised for a reason of its own


class TorchrunStarts(NamedTuple):
    """Torchrun has ended the ranks, is about to start them again, and waits for Answer."""


class TorchrunGone(NamedTuple):
    """Torchrun has ended, but not the program that runs it (neuron_parallel_compile)."""

    returncode: int = 0  # negative: by this signal
    error: str = ""

    @property
    def says_why(self) -> bool:
        """Whether it failed by itself: it may only have been told to end, by the kernel as well."""
        return bool(self.error) or self.returncode not in (0, 1, -signal.SIGTERM)


class TorchrunEnded(NamedTuple):
    """Torchrun's process has ended, and everything that ranks sent before has been read.

    If another program runs torchrun, that program has ended.
    """

    returncode: int  # negative: by this signal
    failures: Sequence[RankFailure] = ()  # those that it named
    error: str = ""
    program: str = "torchrun"  # which of the two ended that way


# Events: the answers to actions.


class Responses(NamedTuple):
    """What each rank's process does at the stop (to NoteResponses), by pid."""

    at_stop: Mapping[int, AtSignal]


class Remaining(NamedTuple):
    """The processes of the job that still run (to Look)."""

    processes: Sequence[tuple[int, int]]  # pid, and the pid that leads its session


class ChildEnded(NamedTuple):
    """A process has ended that is neither torchrun nor a rank: one that they left behind."""


# Derived: from what ranks and torchrun say in ranks.py, from three signals in machine.py.


class RankFailed(NamedTuple):
    """A rank has failed, or more is known of how it failed."""

    pid: int


class RankEnded(NamedTuple):
    """A rank's process is gone (after RankFailed, if it is known to have failed)."""

    pid: int


class ThirdInterrupt(NamedTuple):
    """SIGINT came for the third time within 2 s: a person at a terminal."""


# Actions.


class Start(NamedTuple):
    """Start torchrun, with what the channel knows of this host's address ("": nothing)."""

    own_address: str
    name_leads_here: bool


class NoteResponses(NamedTuple):
    """Look what each rank that runs does at a signal; before it is sent. Answer: Responses."""

    number: int


class SignalTorchrun(NamedTuple):
    """Send a signal to torchrun; it passes stops on to each rank's own process.

    Once it is gone, to the program that runs it.
    """

    number: int


class SignalProcesses(NamedTuple):
    """Send a signal to processes of the job; they may be gone by now."""

    pids: Sequence[int]
    number: int


class SignalGroup(NamedTuple):
    """Send a signal to what a rank has started in its process group, not to the rank."""

    pid: int
    number: int


class Answer(NamedTuple):
    """Let torchrun go on, with so many seconds for the ranks to end (None: its own time)."""

    timeout: Optional[float] = None


class Look(NamedTuple):
    """Find the processes of the job that still run. Answer: Remaining.

    `behind`: only those that are neither torchrun nor below it.
    """

    behind: bool = False
