"""What happens between hosts, and what can be done about it. Pure.

Reports go up, commands down: a host reports to the coordinator, which may be here; what that
decides is a command to each host. Both are messages (messages.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

from launcher.peers.messages import Hello, Message
from launcher.text.words import Log

# Events.


class Arrived(NamedTuple):
    """A connection from `address` has named its host."""

    connection: Any
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
    """This host cannot take the connections of all hosts; it `may_tell` those that come why."""

    why: str
    may_tell: bool = False


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


class EndListening(NamedTuple):
    """Take no more connections."""


class Admit(NamedTuple):
    """Take a connection for a host's."""

    connection: Any
    host: str


class Refuse(NamedTuple):
    """Close a connection: it is not that of a host which is waited for."""

    connection: Any


class Connect(NamedTuple):
    """Connect to the coordinator after `seconds`: `Connected` or `Unreachable` follows."""

    seconds: float


class Disconnect(NamedTuple):
    """Close the connection to the coordinator."""


class MakeStore(NamedTuple):
    """Make the store of the next attempt: `StoreMade` follows."""


class Send(NamedTuple):
    """Send hosts a message; this host's own run is commanded with it."""

    hosts: tuple[str, ...]
    message: Message | MakeStore


Action = Union[Log, EndListening, Admit, Refuse, Connect, Disconnect, Send]
