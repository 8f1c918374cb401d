"""Where the first host listens, and pending connections: who has connected, but not said hello.

The part of first.py's state that is of use until all hosts have joined. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher.peers.events import Accept, Close, Connected, Listen, Send, StopListening
from launcher.peers.messages import LATER

# All in seconds.
_TO_SAY_HELLO = 4  # for a connection
_PAUSE = 0.05  # before connections are taken again, after `Full`
_LISTEN_RETRY = 1  # between two tries to listen

Actions = tuple[Any, ...]


class PendingConnection(NamedTuple):
    """A connection, its two ends, and until when it may say hello."""

    address: str
    own_address: str
    until: float


class PendingConnections(NamedTuple):
    """The pending connections, and when more of them can come.

    Times are on the clock time.monotonic(), infinite if nothing is due; `connections` is in their
    order.
    """

    listen_by: float  # until then another program may have the port
    listen_at: float = math.inf  # when the port, which was taken, is tried again
    resume_at: float = math.inf  # when connections are taken again
    name_leads_here: bool = True
    connections: Mapping[int, PendingConnection] = {}

    @property
    def due(self) -> float:
        """When `tick` is due."""
        first = next(iter(self.connections.values()), None)
        return min(self.listen_at, self.resume_at, first.until if first else math.inf)


def connected(pending: PendingConnections, event: Connected, now: float) -> PendingConnections:
    """Give a connection its time to say hello."""
    new = PendingConnection(event.address, event.own_address, now + _TO_SAY_HELLO)
    return pending._replace(connections={**pending.connections, event.conn: new})


def without(pending: PendingConnections, conn: int) -> PendingConnections:
    """Return the others without a connection: it has said hello, or is closed."""
    connections = dict(pending.connections)
    del connections[conn]
    return pending._replace(connections=connections)


def retry(pending: PendingConnections, now: float) -> PendingConnections:
    """Listen again in a moment."""
    return pending._replace(listen_at=now + _LISTEN_RETRY)


def pause(pending: PendingConnections, now: float) -> PendingConnections:
    """Leave connections with the kernel for a moment, which keeps them and what they say."""
    return pending._replace(resume_at=now + _PAUSE)


def shut(pending: PendingConnections) -> tuple[PendingConnections, Actions]:
    """Take no more connections, and close the pending ones."""
    closed = (Close(conn, "all have joined") for conn in pending.connections)
    shut = pending._replace(listen_at=math.inf, resume_at=math.inf, connections={})
    return shut, (StopListening(), *closed)


def tick(pending: PendingConnections, now: float) -> tuple[PendingConnections, Actions]:
    """Do what is due.

    Connections that have said nothing in time are closed. After `Full` all pending connections are
    closed, with a message to try again later.
    """
    actions: list[Any] = []
    if now >= pending.listen_at:
        pending = pending._replace(listen_at=math.inf)
        actions.append(Listen())
    connections = pending.connections
    if now >= pending.resume_at:
        for conn in connections:
            actions += (Send(conn, LATER), Close(conn, "said no hello, and there was no room"))
        actions.append(Accept())
        return pending._replace(resume_at=math.inf, connections={}), tuple(actions)
    in_time = {conn: one for conn, one in connections.items() if now < one.until}
    if len(in_time) < len(connections):
        actions += (Close(conn, "said no hello") for conn in connections if conn not in in_time)
        pending = pending._replace(connections=in_time)
    return pending, tuple(actions)
