"""The simulated network between launchers: connections to the first host's port.

What a connection does is what TCP does. What one end sends arrives in order, after a while. An end
that closes, or whose process ends, is told to the other end behind what it has sent. Where packets
are lost nothing arrives, and both ends give up by keep-alive (launcher/peers/connection.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from launcher.peers.events import CannotListen, Closed, Connected, Full, Listening, Received
from simulation.clock import Lane
from simulation.machine import Machine
from simulation.plan import What

if TYPE_CHECKING:
    from simulation.job import Job

# In seconds.
GIVES_UP = (9.0, 14.0)  # TCP's keep-alive
TAKES = (0.0002, 0.01)  # a message
PENDING = 64  # connections for which the first host has room, beside those of all hosts

ENDED = "its launcher ended without a word"
SILENT = "it stopped answering"


class Owner(Protocol):
    """Whoever has an end of a connection."""

    machine: Machine
    ends: dict[int, End]  # its own, by number

    def hear_channel(self, event: Any) -> None:
        """Take in what happens to the connection."""


class End:
    """One end of a connection; `conn` is its owner's number for it."""

    def __init__(self, job: Job, owner: Owner) -> None:
        self.job = job
        self.owner = owner
        self.conn = job.next_conn()
        self.is_open = True
        self.is_full = False  # the other end has stopped reading
        self.waiting: list[Any] | None = None  # what has arrived before it was accepted
        self.peer: End
        self._lane = Lane(job.clock)
        owner.ends[self.conn] = self

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        if self.is_full and self.is_open:
            self.job.clock.after(0, self.peer.loses, ENDED)
            self.job.clock.after(0, self.loses, "it stopped reading")
        elif self.is_open:
            self._post(self.peer.receives, message)

    def close(self) -> None:
        """Close it; what was sent before still arrives."""
        if self.is_open:
            self.is_open = False
            self._post(self.peer.loses, ENDED)

    def _post(self, act: Any, *arguments: Any) -> None:
        seconds = self.job.random.uniform(*TAKES)
        seconds += self.owner.machine.delay + self.peer.owner.machine.delay
        self._lane.after(seconds, self._arrive, act, *arguments)

    def _arrive(self, act: Any, *arguments: Any) -> None:
        if self.owner.machine.reaches(self.peer.owner.machine):
            act(*arguments)

    def receives(self, message: Mapping[str, Any]) -> None:
        """A message has come."""
        self._happens(Received(self.conn, message))

    def loses(self, why: str) -> None:
        """The other end is gone, or out of reach."""
        self._happens(Closed(self.conn, why))
        self.is_open = False

    def _happens(self, event: Any) -> None:
        if not self.is_open:
            return
        if self.waiting is not None:
            self.waiting.append(event)
        else:
            self.owner.hear_channel(event)

    def accept(self) -> None:
        """Let the owner hear what has happened by now, and what will."""
        self.owner.hear_channel(Connected(self.conn, self.peer.owner.machine.name, "10.0.0.1"))
        waiting, self.waiting = self.waiting or [], None
        for event in waiting:
            self.owner.hear_channel(event)


class Network:
    """The first host's port, and all connections to it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.listener: Owner | None = None
        self.backlog: list[End] = []
        self.accepts = True
        self.room = job.plan.hosts - 1 + PENDING
        self.accepted: list[End] = []  # at the first host
        self.taken_until = 0.0  # something else listens on the port

    def listen(self, owner: Owner) -> None:
        """Listen for the first host's launcher."""
        if self.job.clock.now < self.taken_until:
            owner.hear_channel(CannotListen("Address already in use", True))
        else:
            self.listener = owner
            owner.hear_channel(Listening(True))

    def stop_listening(self) -> None:
        """Reset what has not been accepted."""
        self.listener = None
        for end in self.backlog:
            end.peer.loses(ENDED)
        self.backlog.clear()

    def accept(self) -> None:
        """Take connections in, as long as there is room."""
        self.accepts = True
        while self.backlog and self.listener and self.accepts:
            if len(self.accepted) >= self.room:
                self.accepted = [end for end in self.accepted if end.is_open]
            if len(self.accepted) >= self.room:
                self.accepts = False
                self.listener.hear_channel(Full())
                return
            end = self.backlog.pop(0)
            self.accepted.append(end)
            end.accept()

    def connect(self, owner: Owner) -> End | str:
        """Return this end of a new connection, or why there is none."""
        first = self.job.machines[0]
        if not first.has_started:
            return f"the name {first.name} does not resolve"
        if not owner.machine.reaches(first):
            return "it does not answer"
        if self.listener is None:
            return "nothing listens there"
        end, other = End(self.job, owner), End(self.job, self.listener)
        end.peer, other.peer = other, end
        other.waiting = []
        self.backlog.append(other)
        self.job.clock.after(self.job.random.uniform(*TAKES), self._accept_more)
        return end

    def _accept_more(self) -> None:
        if self.accepts:
            self.accept()

    def give_up(self, machine: Machine) -> None:
        """Nothing gets through to a machine any more: both ends of each connection find out."""
        for end in [*self.accepted, *self.backlog]:
            if machine in (end.owner.machine, end.peer.owner.machine):
                for one in (end, end.peer):
                    seconds = self.job.random.uniform(*GIVES_UP)
                    self.job.clock.after(seconds, one.loses, SILENT)

    def break_(self, end: End, what: What) -> None:
        """Break one connection as a fault has it; the first host's end may find out late."""
        seconds = 0.0
        if what is What.STOPS_READING:
            end.peer.is_full = True
            return
        if what is What.HALF_OPEN:
            seconds = self.job.random.uniform(*GIVES_UP)
        end.loses(SILENT)
        self.job.clock.after(seconds, end.peer.loses, SILENT)
