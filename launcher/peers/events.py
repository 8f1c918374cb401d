"""Events between hosts, and the actions that follow. Pure.

Reports go up, commands down: a host reports to the coordinator, which may be itself, and the
coordinator commands all hosts. Both are messages (messages.py).
"""

from __future__ import annotations

from typing import NamedTuple, Union

from launcher.peers.messages import Hello, Message
from launcher.result.causes import Failure
from launcher.text.words import Log, Note

LOG_MISSING_SECONDS = 30  # between two lines on who is missing

# Events.


class Arrived(NamedTuple):
    """A host has joined, from an address; the coordinator's own from none."""

    hello: Hello
    address: str


class Received(NamedTuple):
    """A message from a joined host or the coordinator, or this host's own report."""

    host: str
    message: Message


class Lost(NamedTuple):
    """The connection to a joined host, or a member's to the coordinator, has ended."""

    host: str
    why: str


class StoreMade(NamedTuple):
    """The store of the next attempt listens on `port`; or that is 0, and `why` says what failed."""

    port: int
    why: str = ""


class Tried(NamedTuple):
    """This host has tried to connect to the coordinator; `trouble` is "" if it is connected now."""

    trouble: str = ""


class Time(NamedTuple):
    """Something is due."""


# Actions.


class Send(NamedTuple):
    """Send connected hosts a message; for this host itself, it is a command to its run."""

    hosts: tuple[str, ...]
    message: Message


class Alone(NamedTuple):
    """Tell this host's run that the coordinator is lost, or was never reached."""

    failure: Failure


Action = Union[Log, Note, Send, Alone]
