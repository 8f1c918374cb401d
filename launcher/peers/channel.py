"""This host's side of the hosts' agreement, and its connections to the other launchers.

    channel = Channel(job, system, command, note)
    channel.begin()

Events go to the coordinator's state machine, or a member's. The actions are carried out here,
except commands to this host's own run, by command(message), and notes, by note(note).

A command may make this host's run report at once, and a report is an event here (stepping.py).

A connection is a stranger's until its hello arrives. One that breaks a rule is closed, and the
others do not notice. When there is no room, the oldest stranger's is closed, so idle connections
can block it only briefly; a host whose hello was on its way connects again.

TCP detects a dead host, but not a launcher that is suspended, frozen or blocked: its kernel still
answers. So the loop itself sends `Alive` on each connection, and a connection that has been silent
for a while is lost. A coordinator may be silent before its first message: it may be slow to welcome
this host.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
from collections.abc import Iterable
from typing import Any, Callable

from launcher.host.stepping import Stepping
from launcher.host.system import System
from launcher.job.job import Job
from launcher.peers import coordinator, events, link, messages
from launcher.peers.coordinator import JobState
from launcher.peers.events import Action, Lost, Received
from launcher.peers.messages import End, Message
from launcher.result.causes import Failure, of_host
from launcher.text.protocol import LineSocket, Lobby, decoded, encoded
from launcher.text.words import Note, other_port

STRANGERS = 64  # connections that fit, besides those of the other hosts
_LISTEN_AGAIN_SECONDS = 1  # between two tries to listen
# For another program to release the port; other programs need that long to see it, too.
_LISTEN_SECONDS = 3
# Between two tries to reach the coordinator: at first, and at most.
_RETRY_SECONDS, MOST_RETRY_SECONDS = 0.02, 1.0
_MOST_REFUSALS_LOGGED = 20
# Between two `Alive` messages. Until such a message is acknowledged the kernel sends no probes, and
# counts the host timeout from that message: so it detects a cut this much later.
_ALIVE_SECONDS = 4.0
# Until a silent launcher is lost: the first, or the second after the host timeout.
_SILENCE_SECONDS, _MORE_SECONDS = 60.0, 30.0
_PROBES = 7  # of TCP's keep-alive, in --launcher-host-timeout
_BUFFER = 1 << 18  # bytes that may wait to be acknowledged


class Connection(LineSocket):
    """One end of a TCP connection; `host` is at the other end, "" until that has said its name.

    `own_address` is this end's, known once it is a host's. `received_at` is when a line last
    arrived, infinite if none has.
    """

    limit = 1 << 16  # bytes
    host = own_address = ""
    received_at = math.inf
    _stopped_reading = False  # the other end

    def admit(self, host: str, timeout: int) -> None:
        """Make it a host's; it ends if the kernel there does not answer for `timeout` seconds."""
        self.host, self.is_stranger = host, False
        between = max(1, timeout // _PROBES)
        options = {
            (socket.SOL_SOCKET, socket.SO_SNDBUF): _BUFFER,
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
            (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): between,
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): between,
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): _PROBES,
            # The kernel sends no probes while sent data is not acknowledged. (ms)
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 1000 * timeout,
        }
        with contextlib.suppress(OSError):  # it has ended already: the next read finds that
            for option, value in options.items():
                self.socket.setsockopt(*option, value)
            self.own_address = _plain(self.socket.getsockname()[0])

    @property
    def address(self) -> str:
        """The other end's address."""
        try:
            return _plain(self.socket.getpeername()[0])
        except OSError:
            return "an address that is gone"

    def send(self, line: bytes) -> bool:
        """Send a line; there are so few that the kernel takes each line whole.

        The longest hold ranks' stacks; the buffer has room for several unacknowledged ones.
        """
        if not self._stopped_reading and not super().send(line):
            self._stopped_reading = True
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # the next read finds that
        return not self._stopped_reading

    def why_lost(self, error: Exception) -> str:
        """Return the words for how it has ended."""
        if isinstance(error, ValueError):
            return "it sent an invalid message"
        if isinstance(error, (EOFError, ConnectionResetError)):
            return "it stopped reading" if self._stopped_reading else "its launcher died"
        return "it stopped answering"


def _plain(address: str) -> str:
    """Return an IPv4 address without its IPv6 form, which sockets for both use."""
    return address.removeprefix("::ffff:")


class Channel(Stepping):
    """This host's connections; the coordinator's listens until all hosts have joined."""

    state: JobState | link.LinkState

    def __init__(
        self,
        job: Job,
        system: System,
        command: Callable[[Any], None],
        note: Callable[[Note], None],
    ) -> None:
        self._job, self._command = job, command
        self._machine: Any = coordinator if job.coordinates else link
        self._read_as: Callable[[dict[str, Any]], Message]
        self._read_as = messages.from_member if job.coordinates else messages.from_coordinator
        state = self._machine.begin(job, system.now())
        name = "hosts" if job.options.verbose else ""
        super().__init__(system, state, self._machine.step, note, name)
        self._connections: dict[str, Connection] = {}  # by host
        self._refused = 0
        room = len(job.members) + STRANGERS
        self._lobby = Lobby(system.selector, Connection, self._receive, self._lost, room)
        self._silence = max(_SILENCE_SECONDS, job.options.host_timeout + _MORE_SECONDS)
        self._alive_at = self._meet_at = math.inf
        self.own_address = ""  # the address that connects this host to the others
        self.own_name_resolves = True  # as far as it knows

    def begin(self) -> None:
        """Join the other hosts, or begin alone."""
        if isinstance(self.state, JobState):
            self.happens(events.Arrived(messages.hello(self._job), ""))
        if self._job.has_peers:
            self._meet()

    def due(self) -> float:
        """Return when `tick` is due; infinite: never."""
        due: float = min(self._machine.due(self.state), self._alive_at, self._meet_at)
        return due

    def tick(self) -> None:
        """Do what is due."""
        now = self._system.now()
        if now >= self._meet_at:
            self._meet()
        if now >= self._alive_at:
            self._send(self._connections, messages.Alive())
            self._alive_at = now + _ALIVE_SECONDS
            for connection in list(self._connections.values()):
                if now >= connection.received_at + self._silence:
                    self._give_up(connection)
        if now >= self._machine.due(self.state):
            self.happens(events.Time())

    def _give_up(self, connection: Connection) -> None:
        """Lose a host whose launcher is silent.

        The connection stays: if the launcher continues, it reads there how the job ended.
        """
        connection.ignore()
        connection.received_at = math.inf
        why = f"its launcher has not answered for {self._silence:g} s"
        self.happens(Lost(connection.host, why))

    def report(self, message: messages.FromMember) -> None:
        """Report to the coordinator, which may be here."""
        if isinstance(message, Failure):
            self._note(message.note)
        self.happens(Received(self._job.current_host, message))

    def report_last(self, failure: Failure) -> None:
        """Tell the other hosts why this one ends, without the state machine, which has failed.

        A decision of the coordinator stays.
        """
        message: Message = failure
        if isinstance(self.state, JobState):
            if self.state.result:
                return
            message = End(self.state.number + 1, failure.result)
        self._send(self._connections, message)

    def close(self) -> None:
        """Close all connections (LineSocket.close)."""
        self._end_listening()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # Actions.

    def _do(self, action: Action) -> None:
        if isinstance(action, events.Send):
            if isinstance(action.message, messages.Start):
                self._end_listening()  # all have joined
            self._send(action.hosts, action.message)
            if self._job.current_host in action.hosts:
                self._command(action.message)
        else:
            assert isinstance(action, events.Alone)
            self._command(action)

    def _send(self, hosts: Iterable[str], message: Message) -> None:
        to = [self._connections[host] for host in hosts if host in self._connections]
        if to:
            line = encoded(messages.to_wire(message))
            for connection in to:
                connection.send(line)

    # Connections.

    def _meet(self) -> None:
        """Listen on the coordinator; connect to it from other hosts."""
        job, self._meet_at = self._job, math.inf
        address, port = job.cluster.address(job.coordinator), job.options.peer_port
        if job.coordinates:
            self._listen(address, port)
        else:
            self._system.connect(address, port, self._connected)

    def _listen(self, address: str, port: int) -> None:
        """Start listening; try again in a while if another program has the port."""
        job, now = self._job, self._system.now()
        try:
            sockets, self.own_name_resolves = self._system.listen(address, port)
        except OSError as error:
            until = self._began + min(_LISTEN_SECONDS, job.options.start_timeout)
            if error.errno == errno.EADDRINUSE and now < until:
                self._meet_at = now + _LISTEN_AGAIN_SECONDS
            else:
                seen = (
                    f"launcher: {job.current_host} cannot listen on port {port} for the launchers "
                    f"of the other hosts ({os.strerror(error.errno or 0)})"
                )
                self.report(of_host(f"{seen}; {other_port('peer_port')}."))
            return
        self._lobby.listen(*sockets)

    def _end_listening(self) -> None:
        """Accept no more connections, and close those of strangers."""
        self._meet_at = math.inf
        self._lobby.close()

    def _connected(self, what: socket.socket | str) -> None:
        if isinstance(what, str):
            self.happens(events.Tried(what))
            self._connect_again()
        else:
            self._admit(self._lobby.connection_on(what), self._job.coordinator)
            self.happens(events.Tried())

    def _connect_again(self) -> None:
        """Connect after a while that grows, unless the coordinator has welcomed this host."""
        if isinstance(self.state.phase, link.Joining):
            now = self._system.now()
            seconds = max(_RETRY_SECONDS, (now - self._began) / 8)
            self._meet_at = now + min(MOST_RETRY_SECONDS, seconds)

    def _admit(self, connection: Connection, host: str) -> None:
        connection.admit(host, self._job.options.host_timeout)
        self._connections[host] = connection
        self.own_address = connection.own_address
        self._alive_at = min(self._alive_at, self._system.now() + _ALIVE_SECONDS)

    def _receive(self, connection: Connection, line: bytes) -> None:
        """Receive a message of a host, or the hello of a stranger."""
        connection.received_at = self._system.now()
        read_as = self._read_as if connection.host else messages.from_stranger
        try:
            received = read_as(decoded(line))
        except ValueError as error:
            self._lost(connection, error)
            return
        if isinstance(received, messages.Hello):
            self._arrives(connection, received)
        elif not isinstance(received, messages.Alive):
            self.happens(Received(connection.host, received))

    def _arrives(self, connection: Connection, hello: messages.Hello) -> None:
        assert isinstance(self.state, JobState)
        why = coordinator.refusal(self.state, hello)
        if why:
            self._refused += 1
            if self._refused <= _MOST_REFUSALS_LOGGED:
                at = f"from {connection.address} to port {self._job.options.peer_port}"
                self._system.log(f"refused a connection {at}: {why}.")
            self._lose(connection, why)
            return
        self._admit(connection, hello.host)
        self.happens(events.Arrived(hello, connection.address))

    def _lost(self, connection: Connection, error: Exception) -> None:
        self._lose(connection, connection.why_lost(error))

    def _lose(self, connection: Connection, why: str) -> None:
        """Close a connection, which may be a host's."""
        connection.close()
        if self._connections.get(connection.host) is connection:
            del self._connections[connection.host]
            self.happens(Lost(connection.host, why))
            self._connect_again()
