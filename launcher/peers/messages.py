"""What the launchers of one job tell each other: these events are what goes over the wire.

Each host's launcher keeps one TCP connection to that of the first host, the coordinator
(`--launcher-peer-port`), which decides for all; the others are members. A message is a line of
JSON, at most 64 KiB, {"Name": {"field": value, ...}}, in this order:

    a member                        the coordinator
    Hello                           Welcome, or Refused or Later, and hangs up
                                    Missing, every 30 s; Start of attempt 1 when all have joined
    RanksSucceeded, of the first rank
    Failed, Stop, Succeeded         Restart: all hosts end this attempt's ranks
    ProgressReport, when nothing moves
    AtRendezvous                         of torchruns that are started again
    StacksRequest                      CollectStacks, answered by HostStacks; AllStacks
    NoRanksHere                         NoRanksAnywhere: torchrun's store may go
    Cleared                         Start of the next attempt, when all hosts have said it
                                    End: how the job ends, the same on every host
    Alive, each 15 s                Alive, each 15 s

A fingerprint is what must agree between hosts. A host that cannot start has none, and sends its
failure right behind its hello. A connection that ends before the end of the job is a lost host, and
so is one whose other end answers no packet for --launcher-host-timeout (TCP keep-alive, tcp(7)). A
launcher that is stopped, or blocked, still has a kernel that answers; so each says that it is
alive, and one that has said nothing for 60 s is lost as well (channel.py). Once all have joined
nobody else can connect. The protocol has no authentication: it is meant for the job's own network.
Whoever knows the job's name may have sent what comes in, so it is checked here: texts are cut, and
show control characters as Python writes them. Pure.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Union

from launcher.errors import STOPS
from launcher.result.causes import LIMIT, Cause, Failure, Result, stopped
from launcher.text.words import NAMED, join_and_count, printable
from launcher.watch import progress, stacks
from launcher.watch.progress import Rank

_LINE = 700  # characters of a reason
MOST_ENDS = 1000  # of ranks, that one message tells
_VALUE = 1 << 12  # characters of a value to compare, so that a hello stays within its line


class Job(NamedTuple):
    """What does not change: the job, and which of its hosts this one is. Times in seconds.

    `fingerprint` maps what must agree between hosts, in words for a message, to its values here: a
    text or a list of texts. It is empty if this host cannot start. `peer_port` is the coordinator's
    port, 0 if this host's launcher talks to no other: it is alone, or is to be.
    """

    current_host: str
    hosts: tuple[str, ...]
    name: str = ""
    endpoint: str = ""  # where torchruns meet
    max_restarts: int = 0
    grace: float = 100  # that a stop leaves the ranks
    failure_grace: float = 10  # that a failure, or a restart, leaves them
    start_timeout: float = 900
    peer_port: int = 0
    fingerprint: Mapping[str, Any] = {}
    addresses: Mapping[str, str] = {}  # of hosts whose names are not to be looked up
    verbose: bool = False
    watch: float = 0  # between two looks at how far ranks are; 0: none
    hang_notify: float = 60
    hang_timeout: float = math.inf
    host_timeout: int = 14  # for which the network may lose a host's packets

    @property
    def coordinator(self) -> str:
        """The host that decides for all."""
        return self.hosts[0] if self.peer_port else self.current_host

    @property
    def members(self) -> tuple[str, ...]:
        """The other hosts that talk to the coordinator."""
        return self.hosts[1:] if self.peer_port else ()

    @property
    def torchrun_restarts(self) -> bool:
        """Whether restarts are torchrun's: the launchers of several hosts do not talk."""
        return len(self.hosts) > 1 and not self.peer_port

    def address(self, host: str) -> str:
        """Return what a host is looked up by: its name, as a rule."""
        return self.addresses.get(host, host)


# What a member says.


class Hello(NamedTuple):
    """Who a host says it is, and what must agree."""

    job: str
    host: str
    fingerprint: Mapping[str, Any]


class Failed(NamedTuple):
    """A host has failed in an attempt, `age` seconds ago: what ends a rank is certain later."""

    attempt: int
    failure: Failure
    age: float = 0.0


class RanksSucceeded(NamedTuple):
    """Ranks of a host have ended with 0, `ages` seconds ago, the first of them first: `rank`.

    Said of the first, and of all with what this host says next, its failure or its success.
    """

    attempt: int
    rank: int
    ages: tuple[float, ...]


class Stop(NamedTuple):
    """A host was told to stop, by a person or the platform: all hosts stop."""

    number: int


class Succeeded(NamedTuple):
    """All ranks of a host have ended with 0."""

    attempt: int


class NoRanksHere(NamedTuple):
    """No rank of an attempt runs on a host any more: they were ended."""

    attempt: int


class Cleared(NamedTuple):
    """Nothing of an attempt is left on a host but processes that survive SIGKILL.

    `broken` is which hardware of the host is, in words.
    """

    attempt: int
    survivors: int
    broken: str = ""


class ProgressReport(NamedTuple):
    """The ranks of a host of which nothing has moved for a while: all of them, each time.

    `others` counts those that run and neither wait in a collective nor run on after their script.
    """

    attempt: int
    ranks: tuple[Rank, ...]
    others: int = 1


class AtRendezvous(NamedTuple):
    """A host's torchrun waits for the other hosts' torchruns, or has met them."""

    attempt: int
    has_met: bool


class StacksRequest(NamedTuple):
    """Somebody at a host wants to see where all ranks are."""


class HostStacks(NamedTuple):
    """Where the ranks of a host are, to the ShowStacks of this number."""

    number: int
    ranks: stacks.Stacks


# What the coordinator says.


class Welcome(NamedTuple):
    """This host has joined; the others are waited for."""


class Refusal(enum.Enum):
    """Why a host is refused. No names: whoever connects is told them."""

    ANOTHER_JOB = "it runs another job"
    NO_HOST = "its job has no host of that name"
    HAS_JOINED = "a host of that name has joined already"
    ALL_HAVE_JOINED = "all hosts have joined already"


class Refused(NamedTuple):
    """This host is not one that the coordinator waits for."""

    why: Refusal


class Later(NamedTuple):
    """The coordinator has no room for this connection now."""


class Missing(NamedTuple):
    """Some of the hosts that have not joined, and how many more there are."""

    hosts: tuple[str, ...]
    more: int

    @property
    def words(self) -> str:
        """What a message says."""
        return join_and_count(self.hosts, self.more)


class Start(NamedTuple):
    """Start the ranks of an attempt: all hosts have joined, or have cleared the one before."""

    attempt: int


class Restart(NamedTuple):
    """End the ranks of an attempt, for another one to start; `why` is a line for the log."""

    attempt: int
    why: str


class NoRanksAnywhere(NamedTuple):
    """No rank of an attempt runs on any host."""

    attempt: int


class CollectStacks(NamedTuple):
    """Say where this host's ranks are; those that do not answer may get a signal, or not."""

    number: int
    may_signal: bool


class AllStacks(NamedTuple):
    """Where the ranks of all hosts are, for those that wanted to know."""

    lines: tuple[str, ...]


class End(NamedTuple):
    """How the job ends."""

    result: Result


class Alive(NamedTuple):
    """The launcher that says so runs: for the channel, and no event of a machine."""


FromMember = Union[
    Failed,
    RanksSucceeded,
    Stop,
    Succeeded,
    NoRanksHere,
    Cleared,
    ProgressReport,
    AtRendezvous,
    StacksRequest,
    HostStacks,
]
FromCoordinator = Union[
    Welcome, Refused, Later, Missing, Start, Restart, NoRanksAnywhere, CollectStacks, AllStacks, End
]
Message = Union[Hello, FromMember, FromCoordinator, Alive]


def hello(job: Job) -> Hello:
    """Return what a host says first."""
    values = {"list of hosts": list(job.hosts), **job.fingerprint} if job.fingerprint else {}
    return Hello(job.name, job.current_host, {what: _bounded(v) for what, v in values.items()})


def _bounded(value: Any) -> Any:
    """Return a value to compare, or what tells it from others if it is long."""
    text = json.dumps(value)
    if len(text) <= _VALUE:
        return value
    import hashlib  # few jobs need it

    length = f"{len(value)} in all" if isinstance(value, list) else f"{len(value)} characters"
    return f"{text[:40]}... ({length}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def to_wire(message: Message) -> Mapping[str, Any]:
    """Return the JSON object of a message."""
    fields = message._asdict()
    if isinstance(message, Failed):
        failure = message.failure
        fields["failure"] = {**failure._asdict(), "cause": failure.cause.name}
    elif isinstance(message, ProgressReport):
        fields["ranks"] = [progress.to_wire(rank) for rank in message.ranks]
    elif isinstance(message, End):
        fields["result"] = message.result._asdict()
    elif isinstance(message, Refused):
        fields["why"] = message.why.name
    return {type(message).__name__: fields}


def from_stranger(message: Mapping[str, Any]) -> Hello:
    """Return what a host says first. Raises ValueError, or KeyError, if it is not valid."""
    fields = _dict(message["Hello"])
    fingerprint = _dict(fields["fingerprint"])
    for value in fingerprint.values():
        # Nothing that is nested: repr() has a limit to how deep that may be.
        if not all(isinstance(v, str) for v in (value if isinstance(value, list) else [value])):
            raise ValueError
    return Hello(_str(fields["job"]), _str(fields["host"]), fingerprint)


def from_member(message: Mapping[str, Any]) -> FromMember | Alive:
    """Return what a member says. Raises ValueError, or KeyError, if it is not valid."""
    name, fields = _named(message)
    if name == "Failed":
        said = _dict(fields["failure"])
        if said["cause"] not in Cause.__members__:
            raise ValueError
        code = _whole(said["exit_code"], range(1, 256))  # a failure is never a success
        cause, of_rank = Cause[said["cause"]], said["of_rank"] is True
        rank = _whole(said["rank"], range(-1, 1 << 31))
        text, broken = _text(said["text"]), _line(said["broken"])
        failure = Failure(cause, code, text, of_rank, rank, broken)
        return Failed(_whole(fields["attempt"]), failure, progress.seconds(fields["age"]))
    if name == "RanksSucceeded":
        ages = fields["ages"]
        if not isinstance(ages, list) or not 0 < len(ages) <= MOST_ENDS:
            raise ValueError
        rank = _whole(fields["rank"], range(1 << 31))
        return RanksSucceeded(_whole(fields["attempt"]), rank, tuple(map(progress.seconds, ages)))
    if name == "Stop":
        return Stop(_whole(fields["number"], STOPS))
    if name == "Cleared":
        broken = _line(fields["broken"])
        return Cleared(_whole(fields["attempt"]), _whole(fields["survivors"]), broken)
    if name == "ProgressReport":
        ranks = tuple(progress.from_wire(_dict(rank)) for rank in fields["ranks"])
        return ProgressReport(_whole(fields["attempt"]), ranks, _whole(fields["others"]))
    if name == "AtRendezvous":
        return AtRendezvous(_whole(fields["attempt"]), fields["has_met"] is True)
    if name in ("StacksRequest", "Alive"):
        return StacksRequest() if name == "StacksRequest" else Alive()
    if name == "HostStacks":
        return HostStacks(_whole(fields["number"]), stacks.stacks_of(fields["ranks"]))
    kinds: Mapping[str, type[Succeeded] | type[NoRanksHere]]
    kinds = {"Succeeded": Succeeded, "NoRanksHere": NoRanksHere}
    return kinds[name](_whole(fields["attempt"]))


def from_coordinator(message: Mapping[str, Any], hosts: Collection[str]) -> FromCoordinator | Alive:
    """Return what the coordinator says. Raises ValueError, or KeyError, if it is not valid."""
    name, fields = _named(message)
    if name == "Refused":
        return Refused(Refusal[_str(fields["why"])])
    if name == "Missing":
        missing = fields["hosts"]
        if not isinstance(missing, list) or not 0 < len(missing) <= NAMED:
            raise ValueError
        if not all(isinstance(host, str) and host in hosts for host in missing):
            raise ValueError
        return Missing(tuple(missing), _whole(fields["more"], range(len(hosts))))
    if name == "Restart":
        return Restart(_whole(fields["attempt"]), _line(fields["why"]))
    if name == "End":
        return End(_result(_dict(fields["result"])))
    if name in ("Start", "NoRanksAnywhere"):
        attempt = _whole(fields["attempt"])
        return Start(attempt) if name == "Start" else NoRanksAnywhere(attempt)
    if name == "CollectStacks":
        return CollectStacks(_whole(fields["number"]), _bool(fields["may_signal"]))
    if name == "AllStacks":
        return AllStacks(tuple(_line(line) for line in fields["lines"]))
    if name in ("Welcome", "Later"):
        return Welcome() if name == "Welcome" else Later()
    if name == "Alive":
        return Alive()
    raise ValueError


def checked(failure: Failure, host: str) -> Failure:
    """Return this host's own failure as other hosts take it: cut, and never a success."""
    exit_code = failure.exit_code if 0 < failure.exit_code < 256 else 1
    try:
        return failure._replace(exit_code=exit_code, text=_text(failure.text))
    except ValueError:
        return failure._replace(exit_code=exit_code, text=f"{host} failed\n")


def _named(message: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    for name, fields in message.items():
        return name, _dict(fields)
    raise ValueError


def _result(fields: Mapping[str, Any]) -> Result:
    exit_code = _whole(fields["exit_code"], range(256))
    if exit_code == 0:
        return Result(0)
    if fields["stop_signal"] != 0:
        return stopped(_whole(fields["stop_signal"], STOPS))
    return Result(exit_code, _text(fields["text"]))


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _dict(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _line(value: Any) -> str:
    return printable(_str(value)[:_LINE])[:_LINE]


def _text(value: Any) -> str:
    """Return a text as in the failure file, whose first line is the cause."""
    text = printable(_str(value)[:LIMIT], keep="\n").strip("\n")[: LIMIT - 1]
    if not text.strip():
        raise ValueError
    return text + "\n"


def _whole(value: Any, allowed: Collection[int] = range(10**6)) -> int:
    if type(value) is not int or value not in allowed:  # True is an int, too
        raise ValueError
    return value
