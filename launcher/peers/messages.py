"""What the launchers of one job send each other: these messages are events of the two machines.

Each host's launcher keeps one TCP connection to that of the first host, the coordinator
(`--launcher-peer-port`), which decides for all; the others are members. A message is a line of
JSON, at most 64 KiB, {"Name": {"field": value, ...}}, in this order:

    a member                        the coordinator
    Hello                           Welcome, or Refused or Later, and disconnects
                                    Missing, every 30 s; Start of attempt 1 when all have joined
    RanksSucceeded, of the first rank
    Failed, Stop, Succeeded         Restart: all hosts end this attempt's ranks
    NoProgressReport, of a stall
    AtRendezvous                    of torchruns that are started again
    StacksRequest                   CollectStacks, the reply is HostStacks; AllStacks
    NoRanksHere                     NoRanksAnywhere: torchrun's store may end
    Cleared                         Start of the next attempt, when all hosts have cleared this one
                                    End: how the job ends, the same on every host
    Alive, each 15 s                Alive, each 15 s

A fingerprint is what must agree between hosts. A host that cannot start has none, and sends its
failure right behind its hello. A connection that ends before the end of the job is a lost host, and
so is one whose other end answers no packet for --launcher-host-timeout (TCP keep-alive, tcp(7)). A
launcher that is suspended, or blocked, still has a kernel that answers; so each sends that it is
alive, and one that has sent nothing for 60 s or more is lost as well (channel.py). Once all have
joined nobody else can connect. The protocol has no authentication: it is meant for the job's own
network. Whoever knows the job's name may have sent what comes in, so each field has its bounds
beside it (text/wire.py); texts are cut, and show control characters as Python writes them. Pure.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, NamedTuple, Union, get_args

from launcher.errors import STOPS
from launcher.job.job import Job
from launcher.result.causes import Failure, Result, as_received, failure_code, failure_text
from launcher.text import wire
from launcher.text.wire import Among, Count, Length, Line, Seconds
from launcher.text.words import NAMED, join_and_count
from launcher.watch import stacks
from launcher.watch.progress import StalledRank

MOST_ENDS = 1000  # of ranks, that one message has
_LONGEST_VALUE = 1 << 12  # characters of a value to compare, so that a hello stays within its line


def _comparable(fingerprint: Mapping[str, Any]) -> Mapping[str, Any]:
    for value in fingerprint.values():
        # Nothing that is nested: repr() has a limit to how deep that may be.
        if not all(isinstance(v, str) for v in (value if isinstance(value, list) else [value])):
            raise ValueError(value)
    return fingerprint


# Of a member.


class Hello(NamedTuple):
    """Which host it is, and what must agree."""

    job: str
    host: str
    fingerprint: Annotated[Mapping[str, Any], _comparable]


class Failed(NamedTuple):
    """A host has failed in an attempt, `age` seconds ago: what ends a rank is certain later."""

    attempt: Count
    failure: Failure
    age: Seconds = 0.0


class RanksSucceeded(NamedTuple):
    """Ranks of a host have ended with 0, `ages` seconds ago, the first of them first: `rank`.

    Reported of the first, and of all with what this host reports next, its failure or its success.
    """

    attempt: Count
    rank: Annotated[int, Among(range(1 << 31))]
    ages: Annotated[tuple[Seconds, ...], Length(1, MOST_ENDS)]


class Stop(NamedTuple):
    """A host was sent a stop, by a person or the platform: all hosts stop."""

    number: Annotated[int, Among(STOPS)]


class Succeeded(NamedTuple):
    """All ranks of a host have ended with 0."""

    attempt: Count


class NoRanksHere(NamedTuple):
    """No rank of an attempt runs on a host any more: they were ended."""

    attempt: Count


class Cleared(NamedTuple):
    """A host has ended all of an attempt but processes that survive SIGKILL.

    `broken` is which hardware of the host is, in words.
    """

    attempt: Count
    survivors: Count
    broken: Line = ""


class NoProgressReport(NamedTuple):
    """The ranks of a host that have made no progress for a while: all of them, each time.

    `others` counts those that run and neither wait in a collective nor run on after their script.
    """

    attempt: Count
    ranks: tuple[StalledRank, ...]
    others: Count = 1


class AtRendezvous(NamedTuple):
    """A host's torchrun waits in its rendezvous, or has completed it."""

    attempt: Count
    is_complete: bool


class StacksRequest(NamedTuple):
    """Somebody at a host requests the stacks of all ranks."""


class HostStacks(NamedTuple):
    """The stacks of the ranks of a host, for the CollectStacks of this number."""

    number: Count
    ranks: stacks.Stacks


# Of the coordinator.


class Welcome(NamedTuple):
    """This host has joined; the others are waited for."""


class Refusal(enum.Enum):
    """Why a host is refused. Without names: whoever connects can read it."""

    ANOTHER_JOB = "it runs another job"
    NO_HOST = "its job has no host of that name"
    HAS_JOINED = "a host of that name has already joined"
    ALL_HAVE_JOINED = "all hosts have already joined"


class Refused(NamedTuple):
    """This host is not one that the coordinator waits for."""

    why: Refusal


class Later(NamedTuple):
    """The coordinator has no room for this connection now."""


class Missing(NamedTuple):
    """Some of the hosts that have not joined, and how many more there are."""

    hosts: Annotated[tuple[str, ...], Length(1, NAMED)]
    more: Count

    @property
    def words(self) -> str:
        """The words for a message."""
        return join_and_count(self.hosts, self.more)


class Start(NamedTuple):
    """Start the ranks of an attempt: all hosts have joined, or have cleared the one before."""

    attempt: Count


class Restart(NamedTuple):
    """End the ranks of an attempt, for another one to start; `why` is a line for the log."""

    attempt: Count
    why: Line


class NoRanksAnywhere(NamedTuple):
    """No rank of an attempt runs on any host."""

    attempt: Count


class CollectStacks(NamedTuple):
    """Report the stacks of this host's ranks; those that do not reply may get a signal, or not."""

    number: Count
    may_signal: bool


class AllStacks(NamedTuple):
    """The stacks of all ranks, for those that have requested them."""

    lines: tuple[Line, ...]


class End(NamedTuple):
    """How the job ends."""

    result: Annotated[Result, as_received]


class Alive(NamedTuple):
    """The launcher that sends it runs: for the channel, and no event of a machine."""


FromMember = Union[
    Failed,
    RanksSucceeded,
    Stop,
    Succeeded,
    NoRanksHere,
    Cleared,
    NoProgressReport,
    AtRendezvous,
    StacksRequest,
    HostStacks,
]
FromCoordinator = Union[
    Welcome, Refused, Later, Missing, Start, Restart, NoRanksAnywhere, CollectStacks, AllStacks, End
]
Message = Union[Hello, FromMember, FromCoordinator, Alive]


def hello(job: Job) -> Hello:
    """Return what a host sends first."""
    values = (
        {"list of hosts": list(job.cluster.hosts), **job.fingerprint} if job.fingerprint else {}
    )
    return Hello(
        job.cluster.job_name, job.current_host, {what: _bounded(v) for what, v in values.items()}
    )


def _bounded(value: Any) -> Any:
    """Return a value to compare, or what differs from others if it is long."""
    text = json.dumps(value)
    if len(text) <= _LONGEST_VALUE:
        return value
    import hashlib  # few jobs need it

    length = f"{len(value)} in all" if isinstance(value, list) else f"{len(value)} characters"
    return f"{text[:40]}... ({length}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def to_wire(message: Message) -> Mapping[str, Any]:
    """Return the JSON object of a message."""
    return {type(message).__name__: wire.written(message)}


def from_stranger(message: Mapping[str, Any]) -> Hello:
    """Return what a host sends first. Raises ValueError if it is not valid."""
    hello: Hello = wire.read(Hello, message.get("Hello"))
    return hello


def from_member(message: Mapping[str, Any]) -> FromMember | Alive:
    """Return what a member sends. Raises ValueError if it is not valid."""
    received: FromMember | Alive = _read(_FROM_MEMBER, message)
    return received


def from_coordinator(message: Mapping[str, Any], hosts: Collection[str]) -> FromCoordinator | Alive:
    """Return what the coordinator sends. Raises ValueError if it is not valid."""
    received: FromCoordinator | Alive = _read(_FROM_COORDINATOR, message)
    if isinstance(received, Missing):
        if not all(host in hosts for host in received.hosts) or received.more >= len(hosts):
            raise ValueError(received)
    return received


_FROM_MEMBER = {kind.__name__: kind for kind in (*get_args(FromMember), Alive)}
_FROM_COORDINATOR = {kind.__name__: kind for kind in (*get_args(FromCoordinator), Alive)}


def _read(kinds: Mapping[str, Any], message: Mapping[str, Any]) -> Any:
    for name, fields in message.items():
        if name in kinds:
            return wire.read(kinds[name], fields)
        break
    raise ValueError(message)


def checked(failure: Failure, host: str) -> Failure:
    """Return a host's failure as all hosts take it: cut, and never a success."""
    exit_code = failure_code(failure.exit_code)
    try:
        return failure._replace(exit_code=exit_code, text=failure_text(failure.text))
    except ValueError:
        return failure._replace(exit_code=exit_code, text=f"{host} failed\n")
