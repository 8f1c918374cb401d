"""What happens between hosts, and what can be done about it. Pure.

The coordinator has all of these events but Connected and Unreachable; a member has those two, Time,
and of its coordinator Said and Lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from launcher.peers.messages import FromCoordinator, Hello, Message, Refused

# Events.


class Arrived(NamedTuple):
    """A connection from `address` has said whose it is."""

    conn: int
    address: str
    hello: Hello


class Received(NamedTuple):
    """A host that has joined, or this one, says something."""

    host: str
    message: Any


# Why a connection has ended, where that tells what was at its other end.
HUNG_UP, NO_MESSAGE = "its launcher died", "it sent an invalid message"


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


class Connected(NamedTuple):
    """There is a connection to the coordinator."""


class Unreachable(NamedTuple):
    """The coordinator could not be connected to."""

    trouble: str


class Time(NamedTuple):
    """Something is due."""


# Actions; and Log (text.py).


class Listen(NamedTuple):
    """Take connections: of hosts, until all have joined."""


class StopListening(NamedTuple):
    """Take no more connections."""


class Admit(NamedTuple):
    """Take a connection for a host's."""

    conn: int
    host: str


class Refuse(NamedTuple):
    """Say why a connection is not taken, and hang up."""

    conn: int
    message: Refused


class Connect(NamedTuple):
    """Connect to the coordinator after a wait: `Connected` or `Unreachable` tells how that went."""

    wait: float


class HangUp(NamedTuple):
    """Close the connection of a host, or to it; what was sent before still arrives."""

    host: str


class Send(NamedTuple):
    """Send a message to some hosts."""

    hosts: tuple[str, ...]
    message: FromCoordinator


class Say(NamedTuple):
    """Send the coordinator a message."""

    message: Message


class Tell(NamedTuple):
    """Tell this host's own run."""

    message: Any


class AllKnow(NamedTuple):
    """Told to this host's run: no other host has to be told how the job ends any more."""
