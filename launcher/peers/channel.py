"""This host's side of the hosts' agreement, and its connections to the other launchers.

    channel = Channel(job, system, command, decided)
    channel.begin()

Events go to the coordinator's state machine, or a member's. The actions are carried out here,
except commands to this host's own run: command(message) carries those out. Each step is also passed
to decided(before, event, after, actions, now), for the journal and the log.

A command may make this host's run report at once, and a report is an event here (stepping.py).

TCP detects a dead host, but not a launcher that is suspended, frozen or blocked: its kernel still
answers. So the loop itself sends `Alive` on each connection, and a connection that has been silent
for a while is lost. A coordinator may be silent before its first message: it may be slow to welcome
this host.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable
from selectors import EVENT_READ
from typing import Any, Callable, NoReturn

from launcher.host.stepping import Stepping
from launcher.host.system import System
from launcher.job.job import Job
from launcher.peers import coordinator, events, link, messages
from launcher.peers.connection import Connection
from launcher.peers.events import NO_MESSAGE, Action, Lost, Received
from launcher.peers.listener import Listener
from launcher.peers.messages import End, Message
from launcher.peers.state import JobState
from launcher.result.causes import Failure
from launcher.text.protocol import encoded
from launcher.text.words import Log

# Between two `Alive` messages. Until such a message is acknowledged the kernel sends no probes, and
# counts the host timeout from that message: so it detects a cut this much later.
_ALIVE_SECONDS = 4.0
# Until a silent launcher is lost: the first, or the second after the host timeout.
_SILENCE_SECONDS, _MORE_SECONDS = 60.0, 30.0


class Channel(Stepping):
    """This host's connections, and its listener, if it has one."""

    state: JobState | link.LinkState

    def __init__(
        self,
        job: Job,
        system: System,
        command: Callable[[Any], None],
        decided: Callable[[Any, Any, Any, Any, float], None],
    ) -> None:
        self._job, self._command = job, command
        self._coordinates = job.coordinator == job.current_host
        self._machine: Any = coordinator if self._coordinates else link
        self._read_as: Callable[[dict[str, Any]], Message]
        self._read_as = messages.from_member if self._coordinates else messages.from_coordinator
        state, self._first = self._machine.begin(job, system.now())
        name = "hosts" if job.options.verbose else ""
        super().__init__(system, state, self._machine.step, decided, name)
        self._connections: dict[str, Connection] = {}  # by host
        self._silent: list[Connection] = []  # of lost hosts
        self._listener: Listener | None = None
        self._silence = max(_SILENCE_SECONDS, job.options.host_timeout + _MORE_SECONDS)
        self._send_alive_at = self._check_at = math.inf
        self.own_address = ""  # the address that connects this host to the others

    @property
    def own_name_resolves(self) -> bool:
        """Whether other hosts can find this one by its name, as far as it knows."""
        return self._listener is None or self._listener.own_name_resolves

    def begin(self) -> None:
        """Join the other hosts, or begin alone."""
        if self._coordinates and self._job.members:
            self._listener = Listener(
                self._job, self._system, self._connections, self._arrives, self.happens
            )
            self._listener.listen()
        self._act(self._first)

    def due(self) -> float:
        """Return when `tick` is due; infinite: never."""
        due: float = min(self._machine.due(self.state), self._check_at)
        return min(due, self._listener.listen_at) if self._listener else due

    def tick(self) -> None:
        """Do what is due."""
        now = self._system.now()
        if self._listener and now >= self._listener.listen_at:
            self._listener.listen()
        if now >= self._check_at:
            self._check_silence(now)
        if now >= self._machine.due(self.state):
            self.happens(events.Time())

    def report(self, message: messages.Hello | messages.FromMember) -> None:
        """Report to the coordinator, which may be here."""
        self._received(self._job.current_host, message)

    def report_last(self, failure: Failure) -> None:
        """Tell the other hosts why this one ends, without the state machine, which has failed.

        A decision of the coordinator stays.
        """
        message: Message = messages.Failed(self.state.attempt, failure)
        if isinstance(self.state, JobState):
            if self.state.result:
                return
            message = End(self.state.number + 1, failure.result)
        self._send(list(self._connections), message)

    def close(self) -> None:
        """Close all connections (Connection.close)."""
        if self._listener:
            self._listener.close()
        for host in list(self._connections):
            self._drop(host)
        for connection in self._silent:
            connection.close()

    # Liveness.

    def _check_silence(self, now: float) -> None:
        """Send that this launcher runs, and find launchers that do not."""
        connections = list(self._connections.values())
        if now >= self._send_alive_at:
            self._send(list(self._connections), messages.Alive())
            self._send_alive_at = now + _ALIVE_SECONDS
        for connection in connections:
            if now >= connection.received_at + self._silence:
                self._give_up(connection)
        silent_at = (each.received_at + self._silence for each in self._connections.values())
        self._check_at = min((self._send_alive_at, *silent_at))

    def _give_up(self, connection: Connection) -> None:
        """Lose a host whose launcher is silent.

        The connection stays: if the launcher continues, it reads there how the job ended.
        """
        self._silent.append(connection)
        why = f"its launcher has not answered for {self._silence:g} s"
        self.happens(Lost(connection.host, why))
        if self._connections.get(connection.host) is connection:
            del self._connections[connection.host]
            self._system.selector.unregister(connection)

    # Actions.

    def _do(self, action: Action) -> None:
        if isinstance(action, events.Send):
            self._send(action.hosts, action.message)
            if self._job.current_host in action.hosts:
                self._command(action.message)
        elif isinstance(action, Log):
            self._system.log(action.line)
        elif isinstance(action, events.Admit):
            self._admit(action.connection, action.host)
        elif isinstance(action, events.Refuse):
            action.connection.close()
        elif isinstance(action, events.EndListening):
            if self._listener:
                self._listener.close()
        elif isinstance(action, events.Connect):
            address = self._job.cluster.address(self._job.coordinator)
            port, then = self._job.options.peer_port, self._connected
            self._system.connect(address, port, action.seconds, then)
        elif isinstance(action, events.Disconnect):
            self._drop(self._job.coordinator)
        else:
            _unknown(action)

    def _send(self, hosts: Iterable[str], message: Any) -> None:
        to = [self._connections[host] for host in hosts if host in self._connections]
        if self._coordinates and isinstance(message, (End, messages.Leave)):
            to += self._silent
        if to:
            line = encoded(messages.to_wire(message))
            for connection in to:
                connection.send(line)

    def _admit(self, connection: Connection, host: str) -> None:
        now = self._system.now()
        connection.host = host
        self._connections[host] = connection
        self.own_address = connection.own_address
        self._system.selector.register(connection, EVENT_READ, lambda: self._read(connection))
        self._send_alive_at = min(self._send_alive_at, now + _ALIVE_SECONDS)
        self._check_at = min(self._check_at, self._send_alive_at)

    def _drop(self, host: str) -> None:
        connection = self._connections.pop(host, None)
        if connection:
            self._system.selector.unregister(connection)
            connection.close()

    # Events of connections.

    def _arrives(
        self, connection: Connection, hello: messages.Hello, more: list[dict[str, Any]]
    ) -> None:
        connection.received_at = self._system.now()
        self.happens(events.Arrived(connection, connection.address, hello))
        if connection.host:
            self._read_on(connection, more)

    def _connected(self, what: socket.socket | str) -> None:
        if not isinstance(what, str):
            try:
                connection = Connection(what, self._job.options.host_timeout)
            except OSError:
                what.close()
                what = "it does not answer"
            else:
                self._admit(connection, self._job.coordinator)
                self.happens(events.Connected())
                return
        self.happens(events.Unreachable(what))

    def _read(self, connection: Connection) -> None:
        if connection.closed_by:
            return  # an earlier event has closed it
        received = connection.read()
        connection.received_at = self._system.now()
        self._read_on(connection, received)

    def _read_on(self, connection: Connection, received: list[dict[str, Any]]) -> None:
        host = connection.host
        for each in received:
            if self._connections.get(host) is not connection:
                return  # an earlier message has closed it
            try:
                message = self._read_as(each)
            except ValueError:
                connection.closed_by = NO_MESSAGE
                break
            if not isinstance(message, messages.Alive):
                self._received(host, message)
        if connection.closed_by and self._connections.get(host) is connection:
            self._drop(host)
            self.happens(Lost(host, connection.closed_by))

    def _received(self, host: str, message: Message) -> None:
        self.happens(Received(host, message))


def _unknown(action: NoReturn) -> NoReturn:
    """Let mypy find actions that nothing carries out."""
    raise TypeError(action)
