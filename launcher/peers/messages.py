"""The messages between the launchers of one job, which are events of the two state machines.

Each host's launcher keeps one TCP connection to that of the first host, the coordinator
(`--launcher-peer-port`), which decides for all; the others are members. A message is a line of
JSON, at most 64 KiB, {"Name": [value of each field, ...]}, in this order:

    a member                        the coordinator
    Hello                           Welcome, or disconnects; every 30 s again, with who is missing
                                    Start of attempt 1 when all have joined
    Succeeded, of each rank
    Failure, Stop                   End: all hosts end this attempt's ranks
    Cleared, with the number        Start of the next attempt, or Leave, when all hosts have
      of the last End               cleared
    NoProgressReport, of a stall
    StacksRequest                   CollectStacks, the reply is a report; AllStacks
    Alive, every 4 s                Alive, every 4 s

All hosts must agree on the fingerprint. A host that cannot start has none, and sends its failure
right after its hello. A connection that ends before `Leave` means a lost host. So does one whose
other end answers no packet for --launcher-host-timeout (tcp(7)), or whose launcher sends nothing
for 60 s or more (channel.py). Once all have joined, nobody else can connect. The protocol has no
authentication: it is meant for the job's own network. An invalid message closes its connection;
texts are cut, and control characters are shown as Python writes them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Union, get_args

from launcher.errors import STOPS
from launcher.job.job import Job
from launcher.result.causes import LIMIT, Failure, Result, as_received
from launcher.text import wire
from launcher.text.words import printable, shortened
from launcher.watch.waits import AllStacks, CollectStacks, NoProgressReport, StacksRequest

_LONGEST_VALUE = 1 << 12  # characters of a value to compare, so that a hello fits in its line
_LONGEST_LINE = 700  # characters of a line for the log


# From a member.


class Hello(NamedTuple):
    """Which host this is, what must agree, and how many seconds its ranks may take to end."""

    job: str
    host: str
    fingerprint: Mapping[str, Any]
    longest_grace: float

    def __repr__(self) -> str:  # the fingerprint has the script's arguments, which may be secret
        return f"Hello(job={self.job!r}, host={self.host!r})"


class Succeeded(NamedTuple):
    """A rank of a host ended with 0, `age` seconds ago; `are_all`: all of the host's ranks have.

    Then `isolated` is their number, if each was isolated (run/events.py, ScriptEnded); else 0.
    """

    rank: int
    age: float
    are_all: bool = False
    isolated: int = 0


class Stop(NamedTuple):
    """A person or the platform has stopped a host: all hosts stop."""

    number: int


class Cleared(NamedTuple):
    """A host has ended all of its ranks, as the End of this number commands.

    `survivors` counts processes that survive SIGKILL; `files` those that SageMaker would upload,
    after a stop only the new ones; -1: unknown. `handled` counts the ranks that have handled a
    stop, the last within `seconds`; -1: not all have.
    """

    number: int
    survivors: int
    files: int = -1
    handled: int = 0
    seconds: float = 0.0


# From the coordinator.


class Welcome(NamedTuple):
    """This host has joined; later also who is still missing: the names, as they are logged."""

    missing: str = ""


class Start(NamedTuple):
    """Start the ranks of an attempt: all hosts have joined, or have cleared the previous attempt.

    `port` is that of the attempt's own store on the first host, 0 for torchrun's.
    """

    attempt: int
    port: int


class End(NamedTuple):
    """End the ranks of this attempt. `result` is how the job ends, as far as it is known.

    If another attempt follows, `restart` is a line for the log, and the result does not count. A
    later End replaces this one.
    """

    number: int
    result: Result
    restart: str = ""


class Leave(NamedTuple):
    """All hosts have cleared: release torchrun, and end, with the final result."""

    result: Result


class Alive(NamedTuple):
    """The sending launcher runs: for the channel, not an event of a state machine."""


FromMember = Union[Failure, Succeeded, Stop, Cleared, NoProgressReport, StacksRequest]
FromCoordinator = Union[Welcome, Start, End, Leave, CollectStacks, AllStacks]
Message = Union[Hello, FromMember, FromCoordinator, Alive]


def hello(job: Job) -> Hello:
    """Return a host's first message."""
    values = {} if job.error else {"list of hosts": list(job.cluster.hosts), **job.plan.fingerprint}
    return Hello(
        job.cluster.job_name,
        job.current_host,
        {what: _comparable(value) for what, value in values.items()},
        max(job.options.grace, job.options.failure_grace),
    )


def _comparable(value: Any) -> Any:
    """Return a value to compare; of a long one, its beginning and a digest."""
    text = json.dumps(value)
    if len(text) <= _LONGEST_VALUE:
        return value
    import hashlib  # few jobs need it

    length = f"{len(value)} in all" if isinstance(value, list) else f"{len(value)} characters"
    return f"{text[:40]}... ({length}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def to_wire(message: Message) -> Mapping[str, Any]:
    """Return the JSON object of a message; a failure's texts are cut to what its line can hold."""
    if isinstance(message, Failure):
        fields = message._asdict()
        for name, text in fields.items():
            fields[name] = shortened(text, 3 * LIMIT // 2) if isinstance(text, str) else text
        message = Failure(**fields)
    return {type(message).__name__: message}


def from_stranger(message: Mapping[str, Any]) -> Hello:
    """Return a host's first message. Raises ValueError if it is not valid."""
    received: Hello = _read({"Hello": Hello}, message)
    for value in received.fingerprint.values():
        # No nested values: repr() has a limit on depth.
        if not all(isinstance(v, str) for v in (value if isinstance(value, list) else [value])):
            raise ValueError(value)
    return received


def from_member(message: Mapping[str, Any]) -> FromMember | Alive:
    """Return a message from a member. Raises ValueError if it is not valid."""
    received: FromMember | Alive = _read(_FROM_MEMBER, message)
    if isinstance(received, Stop) and received.number not in STOPS:
        raise ValueError(received)
    return received


def from_coordinator(message: Mapping[str, Any]) -> FromCoordinator | Alive:
    """Return a message from the coordinator. Raises ValueError if it is not valid."""
    received: FromCoordinator | Alive = _read(_FROM_COORDINATOR, message)
    if isinstance(received, End):
        restart = printable(received.restart[:_LONGEST_LINE])
        return received._replace(result=as_received(received.result), restart=restart)
    if isinstance(received, Leave):
        return Leave(as_received(received.result))
    return received


_FROM_MEMBER = {kind.__name__: kind for kind in (*get_args(FromMember), Alive)}
_FROM_COORDINATOR = {kind.__name__: kind for kind in (*get_args(FromCoordinator), Alive)}


def _read(kinds: Mapping[str, Any], message: Mapping[str, Any]) -> Any:
    for name, fields in message.items():
        if name in kinds:
            return wire.read(kinds[name], fields)
        break
    raise ValueError(message)
