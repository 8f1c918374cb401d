"""What happens to this host's torchrun and ranks, and what can be done about it.

Events come from the supervisor, which carries the actions out; what the coordinator says is an
event, too (peers/messages.py). Every event of an attempt's processes is of the current one: the
next is started only when none is left, and what is queued of one is forgotten with it (reports.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.errors import Disposition
from launcher.peers.messages import FromMember
from launcher.result.causes import Failure
from launcher.result.raised import Link

# Events.


class CannotStart(NamedTuple):
    """This host cannot start its torchrun."""

    failure: Failure


class Signal(NamedTuple):
    """The launcher was sent a signal that stops a job."""

    number: int


class TorchrunRuns(NamedTuple):
    """Torchrun runs, and can be told what it may do; below another program it may run later."""


class AsksToStart(NamedTuple):
    """Torchrun is about to start the ranks, and waits for the action Answer."""


class RanksStarted(NamedTuple):
    """Torchrun has started the ranks: (pid, rank, local rank) of each.

    `keeps_store`: other hosts' torchruns or ranks need a store that is in this torchrun. `world` is
    how many ranks all hosts have.
    """

    ranks: Sequence[tuple[int, int, int]]
    keeps_store: bool
    world: int = 0


class AsksToEnd(NamedTuple):
    """Torchrun is about to end the ranks, or has seen all of them end; it waits for Answer.

    `number` is the signal for which it does, 0 for none; `error` what it raised; with `tees` it
    copies what ranks wrote (--tee), and may not be through with it.
    """

    number: int = 0
    error: str = ""
    tees: bool = False


class TorchrunEnded(NamedTuple):
    """Torchrun has ended, whoever runs it; all that it and its ranks said before has been heard."""

    returncode: int | None  # negative: by this signal; None: not known
    error: str = ""  # what it raised


class ChildEnded(NamedTuple):
    """The launcher's child has ended: torchrun (after TorchrunEnded), or what runs it."""

    returncode: int


class RankRuns(NamedTuple):
    """A rank's script is about to run."""

    pid: int
    rank: int
    local_rank: int


class RankSaid(NamedTuple):
    """A rank said why it ends, and with which exit code if no sys.excepthook chooses another."""

    pid: int
    exit_code: int  # negative: by this signal
    chain: Sequence[Link]  # what it raised, as raised.read gives it


class RanksAreIn(NamedTuple):
    """Where ranks are that were asked (to AskWhere), by pid: `load, data.py:88`."""

    places: Mapping[int, str]


class RankEnded(NamedTuple):
    """A rank's process has ended; its exit code is None if torchrun alone knows it."""

    pid: int
    exit_code: int | None
    oom: str = ""  # whether an out-of-memory kill was recorded, after a SIGKILL


class Signalled(NamedTuple):
    """What each rank's process did at a signal (to SignalRanks), by pid."""

    disposition: Mapping[int, Disposition]


class Remaining(NamedTuple):
    """The processes of the job that still run beside torchrun and what is below it (to Look)."""

    pids: Sequence[int]


class OrphanEnded(NamedTuple):
    """A process has ended that is neither torchrun nor a rank: one that they left behind."""


class Time(NamedTuple):
    """Something is due."""


# Actions.


class Tell(NamedTuple):
    """Tell the coordinator."""

    message: FromMember


class StartTorchrun(NamedTuple):
    """Start torchrun for an attempt."""

    attempt: int


class Answer(NamedTuple):
    """Let torchrun go on: start the ranks, or end as it would, or (`leave`) end at once."""

    leave: bool = False


class SignalRanks(NamedTuple):
    """Send ranks' own processes a signal; see before what they do at it. Answer: Signalled."""

    pids: Sequence[int]
    number: int


class AskWhere(NamedTuple):
    """Ask all ranks where they are. Answer: RanksAreIn."""


class SignalGroup(NamedTuple):
    """Send a signal to what a rank has started in its process group, not to the rank."""

    pid: int
    number: int


class SignalChild(NamedTuple):
    """Send the program that runs torchrun, and what it has started in its group, a signal."""

    number: int


class KillTorchrun(NamedTuple):
    """Kill torchrun."""


class KillRanks(NamedTuple):
    """Kill ranks, each with its process group."""

    pids: Sequence[int]


class SignalProcesses(NamedTuple):
    """Send a signal to processes that were left behind; they may be gone by now."""

    pids: Sequence[int]
    number: int


class Look(NamedTuple):
    """Find what ranks have left behind. Answer: Remaining."""


Actions = tuple[Any, ...]
