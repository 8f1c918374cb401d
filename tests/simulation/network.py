"""The simulated network between launchers: connections to the coordinator's port.

What a connection does is what TCP does. What one end sends arrives in order, after a while. An end
that closes, or whose process ends, is told to the other end behind what it has sent. Where packets
are lost nothing arrives, and both ends give up by keep-alive (launcher/peers/connection.py).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from simulation.clock import Lane
from simulation.machine import Machine
from simulation.plan import What
from simulation.system import TIMED_OUT, End, Listener

if TYPE_CHECKING:
    from simulation.job import Job

# In seconds.
GIVES_UP = (14.0, 18.5)  # connection.py
TAKES = (0.0002, 0.01)  # a message


class Socket(End):
    """One end of a connection of a machine."""

    def __init__(self, job: Job, machine: Machine) -> None:
        super().__init__(self._posts, self._hangs_up)
        self.job, self.machine = job, machine
        self.peer: Socket
        self.is_open = True
        self.is_full = False  # the other end has stopped reading
        self._lane = Lane(job.clock)

    def send(self, data: bytes) -> int:
        """Send data, if the other end reads."""
        if self.is_full:
            self.job.clock.after(0, self.peer.loses)
            return 0
        return super().send(data)

    def _posts(self, data: bytes) -> None:
        self.job.watch.sends(self.machine)
        self._lane.after(self._takes(), self._arrive, self.peer.comes, data)

    def _hangs_up(self) -> None:
        if self.is_open:
            self.is_open = False
            self._lane.after(self._takes(), self._arrive, self.peer.loses)

    def _takes(self) -> float:
        return self.job.random.uniform(*TAKES) + self.machine.delay + self.peer.machine.delay

    def _arrive(self, act: Any, *arguments: Any) -> None:
        if self.peer.is_open and self.machine.reaches(self.peer.machine):
            act(*arguments)

    def times_out(self) -> None:
        """No packet has been answered for too long."""
        self.loses(TIMED_OUT)


class Network:
    """The coordinator's port, and all connections to it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.listener: Listener | None = None
        self.sockets: list[Socket] = []
        self.taken_until = 0.0  # something else listens on the port

    def listen(self) -> Listener:
        """Listen for the coordinator."""
        self.listener = Listener(self._stop_listening)
        return self.listener

    def _stop_listening(self) -> None:
        if self.listener:
            for end in self.listener.backlog:
                end.is_open = False
                end.peer.loses()
            self.listener.backlog.clear()
        self.listener = None

    def connect(self, machine: Machine, by: random.Random) -> Socket | str:
        """Return a machine's end of a new connection, or why there is none."""
        first = self.job.machines[0]
        if not first.has_started:
            return f"the name {first.name} does not resolve"
        if not machine.reaches(first):
            return "it does not answer"
        if self.listener is None:
            return "nothing is listening there"
        end, other = Socket(self.job, machine), Socket(self.job, first)
        end.peer, other.peer = other, end
        self.sockets += (end, other)
        self.job.clock.after(by.uniform(*TAKES), self._arrives, other)
        return end

    def _arrives(self, end: Socket) -> None:
        if self.listener:
            self.listener.add(end)
        else:
            end.peer.loses()

    def of(self, machine: Machine) -> list[Socket]:
        """Return the ends of a machine that are open."""
        return [end for end in self.sockets if end.machine is machine and end.is_open]

    def disconnect(self, machine: Machine) -> None:
        """A machine's launcher has ended: the kernel closes what it has open."""
        if machine.number == 0 and machine in self.job.machines:
            self._stop_listening()
        for end in self.of(machine):
            end.close()

    def give_up(self, machine: Machine) -> None:
        """Nothing gets through to a machine any more: both ends of each connection find out."""
        for end in self.sockets:
            if end.is_open and machine in (end.machine, end.peer.machine):
                self.job.clock.after(self.job.random.uniform(*GIVES_UP), end.times_out)

    def break_(self, end: Socket, what: What) -> None:
        """Break one connection as a fault has it; the coordinator's end may find out late."""
        if what is What.STOPS_READING:
            end.peer.is_full = True
            return
        seconds = self.job.random.uniform(*GIVES_UP) if what is What.HALF_OPEN else 0.0
        end.times_out()
        self.job.clock.after(seconds, end.peer.times_out)
