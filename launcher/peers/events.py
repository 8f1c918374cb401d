"""What happens between hosts, and what can be done about it. Pure.

Reports go up, commands down: a host reports to the coordinator, which may be here; what that
decides is a command to each host. Both are messages (messages.py).
"""

from __future__ import annotations

from typing import NamedTuple, Union

from launcher.peers.messages import FromCoordinator, FromMember, Hello, Message, Refused
from launcher.text.words import Log

# Events.


class Arrived(NamedTuple):
    """A connection from `address` has named its host."""

    conn: int
    address: str
    hello: Hello


class Received(NamedTuple):
    """A message of a host that has joined, of the coordinator, or a report of this host's own."""

    host: str
    message: Message


# Why a connection has ended.
CLOSED, NO_MESSAGE = "its launcher died", "it sent an invalid message"


class Lost(NamedTuple):
    """The connection to a host that has joined has ended, or a member's to the coordinator."""

    host: str
    why: str


class CannotListen(NamedTuple):
    """This host cannot take connections, nor will it be able to."""

    why: str


class TooFewFiles(NamedTuple):
    """This process can have `files` descriptors, but needs more for all hosts' connections."""

    files: int
    needs: int


class StoreMade(NamedTuple):
    """The store of the next attempt listens on `port`; or that is 0, and `why` says what failed."""

    port: int
    why: str = ""


class Connected(NamedTuple):
    """There is a connection to the coordinator."""


class Unreachable(NamedTuple):
    """The coordinator could not be connected to."""

    trouble: str


class Time(NamedTuple):
    """Something is due."""


# Actions.


class Listen(NamedTuple):
    """Take connections: of hosts, until all have joined."""


class EndListening(NamedTuple):
    """Take no more connections."""


class Admit(NamedTuple):
    """Take a connection for a host's."""

    conn: int
    host: str


class Refuse(NamedTuple):
    """Send why a connection is not taken, and disconnect."""

    conn: int
    message: Refused


class Connect(NamedTuple):
    """Connect to the coordinator after `seconds`: `Connected` or `Unreachable` follows."""

    seconds: float


class Disconnect(NamedTuple):
    """Close the connection to the coordinator."""


class Send(NamedTuple):
    """Send some hosts a message."""

    hosts: tuple[str, ...]
    message: FromCoordinator


class Report(NamedTuple):
    """Send the coordinator a message."""

    message: Hello | FromMember


class MakeStore(NamedTuple):
    """Make the store of the next attempt: `StoreMade` follows."""


class Command(NamedTuple):
    """Have this host's own run do what the coordinator commands."""

    message: FromCoordinator | MakeStore


Action = Union[Log, Listen, EndListening, Admit, Refuse, Connect, Disconnect, Send, Report, Command]
