"""What happens to this host's torchrun and ranks, and what can be done about it.

Events come from the supervisor, which carries the actions out; commands of the coordinator are
events, too (peers/messages.py). An event of an attempt's processes is of the current one: the next
is started when none is left on any host, and what is queued of one is forgotten with it
(reports.py). What was searched for (LeftoversFound, GpusChecked) may come late: it counts in the
phase Ending alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.errors import Disposition
from launcher.peers.events import Report as Report
from launcher.peers.events import Time as Time
from launcher.result.causes import Failure
from launcher.result.raised import Link
from launcher.watch.stacks import Calls

# Events.


class CannotStart(NamedTuple):
    """This host cannot start its torchrun."""

    failure: Failure


class LauncherFailed(NamedTuple):
    """The launcher has met an error of its own."""

    failure: Failure


class Signal(NamedTuple):
    """The launcher was sent a signal that stops a job."""

    number: int


class TorchrunRuns(NamedTuple):
    """Torchrun runs, and can be sent replies; below another program it may run later."""


class ReachedRendezvous(NamedTuple):
    """Torchrun has imported torch, and waits for those of the other hosts."""


class StartRequested(NamedTuple):
    """All torchruns have found each other; this one waits for permission to start ranks: Reply.

    `ranks` are (rank, local rank) of each. `keeps_store`: other hosts' torchruns or ranks need a
    store that is in this torchrun. `world` is how many ranks all hosts have.
    """

    ranks: Sequence[tuple[int, int]]
    keeps_store: bool
    world: int = 0


class CloseRequested(NamedTuple):
    """Torchrun is about to end the ranks, or has seen all of them end; it waits for Reply.

    `number` is the signal for which it does, 0 for none; `error` what it raised; with `tees` it
    copies what ranks wrote (--tee), and may not be through with it.
    """

    number: int = 0
    error: str = ""
    tees: bool = False


class TorchrunEnded(NamedTuple):
    """Torchrun has ended, whoever runs it; all that it and its ranks reported is known."""

    returncode: int | None  # negative: by this signal; None: not known
    error: str = ""  # what it raised
    oom: str = ""  # that an out-of-memory kill was recorded, after a SIGKILL


class ChildEnded(NamedTuple):
    """The launcher's child has ended: torchrun (after TorchrunEnded), or what runs it."""

    returncode: int
    oom: str = ""  # that an out-of-memory kill was recorded, after a SIGKILL


class RankRuns(NamedTuple):
    """A rank is the launcher's child, and waits for go before its script runs: ReplyToRank."""

    pid: int
    rank: int
    local_rank: int


class RankNotStarted(NamedTuple):
    """A process that torchrun started has ended, and has not become a rank."""

    pid: int
    rank: int
    local_rank: int
    exit_code: int  # negative: by this signal


class RankExits(NamedTuple):
    """A rank reports why it ends, and its exit code if no sys.excepthook chooses another."""

    pid: int
    exit_code: int  # negative: by this signal
    chain: Sequence[Link]  # what it raised, as raised.read gives it
    oom: str = ""  # that an out-of-memory kill was recorded, if a process of it may be killed
    killed: str = ""  # that one of multiprocessing's was, in words, behind a broken connection


class ThreadRaised(NamedTuple):
    """A thread of a rank raised; the rank itself may go on."""

    pid: int
    thread: str  # its name
    chain: Sequence[Link]  # not empty
    oom: str = ""  # as of RankExits


class ScriptEnded(NamedTuple):
    """A rank's script has returned, or called sys.exit(0); its threads and exit handlers run on."""

    pid: int


class PlacesReported(NamedTuple):
    """Where ranks are (to RequestPlaces), by pid: `load, data.py:88`."""

    places: Mapping[int, str]


class RankEnded(NamedTuple):
    """A rank's process has ended."""

    pid: int
    exit_code: int  # negative: by this signal
    oom: str = ""  # whether an out-of-memory kill was recorded, after a SIGKILL or a child's
    calls: Calls = ()  # where it crashed, if it did
    at: str = ""  # the time of day of a crash
    said: str = ""  # why it was aborted, by the last lines that it has written


class Signalled(NamedTuple):
    """What each rank's process did at a signal (to SignalRanks), by pid."""

    disposition: Mapping[int, Disposition]


class LeftoversFound(NamedTuple):
    """The job's processes that run beside torchrun and what is below it (to FindLeftovers)."""

    pids: Sequence[int]


class GpusChecked(NamedTuple):
    """What is broken of this host's GPUs by their driver's words (to CheckGpus); "": nothing known.

    The words begin with the host.
    """

    broken: str


class OrphanEnded(NamedTuple):
    """A process has ended that is neither torchrun nor a rank: a leftover one."""

    pid: int
    exit_code: int  # negative: by this signal


# Time, when something is due, is that of peers/events.py.


# Actions; and Report, of peers/events.py, to the coordinator.


class StartTorchrun(NamedTuple):
    """Start torchrun for an attempt."""

    attempt: int


class Reply(NamedTuple):
    """Let torchrun go on: start the ranks, or end as it would, or (`depart`) end at once."""

    depart: bool = False


class ReplyToRank(NamedTuple):
    """Let a rank's script run, or have the rank end before that."""

    pid: int
    lets_go: bool


class SignalRanks(NamedTuple):
    """Send ranks' own processes a signal; see before what they do at it. Brings about Signalled."""

    pids: Sequence[int]
    number: int


class RequestPlaces(NamedTuple):
    """Request of all ranks where they are. Brings about PlacesReported."""


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
    """Send a signal to leftover processes; they may be gone by now."""

    pids: Sequence[int]
    number: int


class FindLeftovers(NamedTuple):
    """Find the leftover processes. Brings about LeftoversFound."""


class CheckGpus(NamedTuple):
    """Ask this host's driver which GPUs are broken. Brings about GpusChecked."""


class CancelGpuCheck(NamedTuple):
    """Wait no longer for that answer; kill what was asked."""


Actions = tuple[Any, ...]
