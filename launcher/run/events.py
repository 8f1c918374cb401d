"""Events of this host's ranks and its torchrun, and the actions that follow.

Events come from the loop, which carries out the actions. Messages between hosts (peers/messages.py)
are events, too: the coordinator's commands Start, End and Leave, and what happens to this host as a
whole, Stop and Failure. And they are actions: reports to the coordinator, and CollectStacks. Ranks
have their global numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from launcher.errors import Disposition
from launcher.result.causes import Exit

# Events.


class TorchrunEnded(NamedTuple):
    """Torchrun has ended, or the program that runs it."""

    returncode: int  # negative: by this signal
    error: str = ""  # its own words
    oom: str = ""  # that an out-of-memory kill was recorded, after a SIGKILL


class NothingLeft(NamedTuple):
    """No keeper is connected, and the launcher has no child left."""


class KeeperJoined(NamedTuple):
    """Torchrun has started a rank, whose keeper waits for a command.

    `nproc` is the number of ranks of this host; `group_rank` is 0 on the host whose address all
    ranks get as MASTER_ADDR.
    """

    rank: int
    local_rank: int
    nproc: int
    group_rank: int = 0


class KeeperLost(NamedTuple):
    """A rank's keeper has ended: it was killed, or told to leave."""

    rank: int


class StubSignalled(NamedTuple):
    """A rank's stub got a signal, as from a torchrun that is told to end, or was killed."""

    rank: int
    number: int


class RankRuns(NamedTuple):
    """A rank's script is about to run."""

    rank: int
    pid: int


class RankExits(NamedTuple):
    """A rank reports why it ends, and its exit code if no sys.excepthook chooses another."""

    rank: int
    end: Exit


class ThreadRaised(NamedTuple):
    """A thread of a rank raised; the rank itself may continue."""

    rank: int
    thread: str  # its name
    end: Exit


class ScriptEnded(NamedTuple):
    """A rank's script has returned, or called sys.exit(0); its threads and exit handlers run on.

    It was `isolated` if it has exchanged nothing with other ranks, as far as can be known.
    """

    rank: int
    isolated: bool = False


class RankEnded(NamedTuple):
    """A rank's process has ended; `response` is its disposition for the signal that it got."""

    rank: int
    end: Exit
    response: Disposition | None = None


class KeeperCleared(NamedTuple):
    """Nothing of a rank is left after end `number`, except `survivors` stuck in the kernel."""

    rank: int
    number: int
    survivors: int


# Actions.


class StartTorchrun(NamedTuple):
    """Start torchrun, once for the whole job."""


class RunRanks(NamedTuple):
    """Have keepers start the script for the current attempt (State.attempt, State.port)."""

    ranks: Sequence[int]


class EndRanks(NamedTuple):
    """Have all keepers end their processes: KeeperCleared with this number follows.

    `number` counts this host's ends, and is not that of the coordinator's End. `waits`: ranks'
    leftovers get the grace, too. `at_once`: there is no grace, even if a previous command gave one.
    """

    number: int
    signal_number: int
    grace: float
    waits: bool = False
    at_once: bool = False


class LeaveRanks(NamedTuple):
    """Have keepers leave, and their stubs end with a code: all, or those of `ranks`."""

    exit_code: int
    ranks: Sequence[int] | None = None


class KillTorchrun(NamedTuple):
    """Kill torchrun, and the program that runs it with all below it."""


Actions = tuple[Any, ...]
