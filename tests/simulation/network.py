"""The simulated network between launchers: connections to the coordinator's port.

What a connection does is what TCP does. What one end sends arrives in order, after a while. An end
that closes, or whose process ends, is told to the other end behind what it has sent. Where packets
are lost nothing arrives, and both ends give up by keep-alive (launcher/peers/channel.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.machine import Machine
from simulation.system import TIMED_OUT, End, Listener

if TYPE_CHECKING:
    from simulation.job import Job

# In seconds.
GIVES_UP = (14.0, 18.5)  # connection.py
TAKES = (0.0002, 0.01)  # a message


class Socket(End):
    """One end of a connection of a machine."""

    peer: Socket

    def takes(self) -> float:
        """Return how many seconds a message is on its way."""
        delays = self.machine.delay + self.peer.machine.delay
        return self.machine.job.random.uniform(*TAKES) + delays

    def send(self, data: bytes) -> int:
        """Send data."""
        self.machine.job.watch.acts(self.machine, "sends something")
        return super().send(data)

    def _arrives(self, what: bytes | OSError) -> None:
        if self.machine.reaches(self.peer.machine):
            super()._arrives(what)

    def times_out(self) -> None:
        """No packet has been answered for too long."""
        self.comes(TIMED_OUT)


class Network:
    """The coordinator's port, and all connections to it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.listener = Listener()
        self.listener.close()
        self.sockets: list[Socket] = []
        self.taken_until = 0.0  # something else listens on the port

    def listen(self) -> Listener:
        """Listen for the coordinator."""
        self.listener = Listener()
        return self.listener

    def connect(self, machine: Machine) -> Socket | str:
        """Return a machine's end of a new connection, or why there is none."""
        first = self.job.machines[0]
        if not first.has_started:
            return f"the name {first.name} does not resolve"
        if not machine.reaches(first):
            return "it does not answer"
        if not self.listener.is_open:
            return "nothing is listening there"
        end, other = Socket(machine), Socket(first)
        end.peer, other.peer = other, end
        self.sockets += (end, other)
        self.job.clock.after(self.job.random.uniform(*TAKES), self._arrives, other)
        return end

    def _arrives(self, end: Socket) -> None:
        if self.listener.is_open:
            self.listener.comes(end)
        else:
            end.close()

    def of(self, machine: Machine) -> list[Socket]:
        """Return the ends of a machine that are open."""
        return [end for end in self.sockets if end.machine is machine and end.is_open]

    def disconnect(self, machine: Machine) -> None:
        """A machine's launcher has ended: the kernel closes what it has open."""
        if machine is self.job.machines[0]:
            self.listener.close()
        for end in self.of(machine):
            end.close()

    def give_up(self, machine: Machine) -> None:
        """Nothing gets through to a machine any more: both ends of each connection find out."""
        for end in self.sockets:
            if end.is_open and machine in (end.machine, end.peer.machine):
                self.job.clock.after(self.job.random.uniform(*GIVES_UP), end.times_out)
