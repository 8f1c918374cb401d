"""This host's part of the job's agreement, and its connections to the other hosts' launchers.

    channel = Channel(job, system, command, decided)
    channel.begin()

What happens is given to the coordinator's state machine, or a member's; what they decide is done
here, but for what they command this host's own run: that is done by command(message). Whoever
notes what is decided has decided(before, event, after, now).

*The order of things.* A command may have this host's run report at once, and a report is an event
here. So events queue: all actions of a step are carried out before the next event is taken in
(happens). The supervisor does the same, so that neither machine is ever stepped within a step.

TCP finds a host that is gone, but not a launcher that is suspended, frozen or blocked: its kernel
still answers. So the loop itself sends `Alive` on each connection, and one on which nothing has
come for a while is lost.
"""

from __future__ import annotations

import collections
import contextlib
import math
import socket
from collections.abc import Sequence
from selectors import EVENT_READ
from typing import Any, Callable, NoReturn

from launcher.host.system import System
from launcher.job.job import Job
from launcher.peers import coordinator, events, member
from launcher.peers.connection import Connection
from launcher.peers.events import Action, Lost, Received, Time
from launcher.peers.listener import Listener
from launcher.peers.member import MemberState
from launcher.peers.messages import (
    Alive,
    End,
    Failed,
    FromMember,
    Hello,
    HostStacks,
    Message,
    NoProgressReport,
    Welcome,
    from_coordinator,
    from_member,
    to_wire,
)
from launcher.peers.state import JobState
from launcher.result.causes import Failure
from launcher.text.log import described
from launcher.text.protocol import encoded
from launcher.text.words import Log
from launcher.watch import progress, stacks

_ALIVE_SECONDS = 15.0  # between two messages that this launcher is alive
# Until a launcher is lost that sends nothing: that, or so many times --launcher-host-timeout.
_SILENCE_SECONDS, _SILENCE_TIMEOUTS = 60.0, 4
# A loop that is so late was suspended itself, and does not know how long others were silent.
_LATE_SECONDS = 1.0
_RECHECK_SECONDS = 1.0  # until a connection that gives up early may have been answered


class Channel:
    """This host's connections, and where it listens, if it does."""

    def __init__(
        self,
        job: Job,
        system: System,
        command: Callable[[Any], None],
        decided: Callable[[Any, Any, Any, float], None],
    ) -> None:
        self._job, self._system, self._command, self._decided = job, system, command, decided
        self._coordinates = job.coordinator == job.current_host
        self._machine: Any = coordinator if self._coordinates else member
        self._connections: dict[str, Connection] = {}  # by host
        self._arrived: dict[int, Connection] = {}  # whose hello has just come
        self._listener: Listener | None = None
        self._silence = max(_SILENCE_SECONDS, _SILENCE_TIMEOUTS * job.options.host_timeout)
        self._send_alive_at = self._check_at = math.inf
        self._events = collections.deque[Any]()
        self._is_acting = False
        self._given_up: list[Connection] = []  # since their launchers are silent
        self._began = system.now()
        self.world = 0  # how many ranks the job has, as this host's torchrun reports; 0: not known
        self.own_address = ""  # at which other hosts have reached this one, or it them
        self.state: JobState | MemberState
        self.state, self._first = self._machine.begin(job, self._began)

    @property
    def own_name_resolves(self) -> bool:
        """Whether this host can be found by its own name, as far as it knows."""
        return self._listener is None or self._listener.own_name_resolves

    def begin(self) -> None:
        """Join the other hosts, or begin alone."""
        self._act(self._first)

    def due(self) -> float:
        """Return when `tick` is due; infinite: never, as while ranks run."""
        due: float = min(self._machine.due(self.state), self._check_at)
        return min(due, self._listener.due()) if self._listener else due

    def tick(self) -> None:
        """Do what is due."""
        if self._listener:
            self._listener.tick()
        if self._system.now() >= self._check_at:
            self._check_silence(self._system.now())
        if self._system.now() >= self._machine.due(self.state):
            self.happens(Time())

    def report(self, message: Hello | FromMember) -> None:
        """Report to the coordinator, which may be here."""
        self._received(self._job.current_host, message)

    def report_last(self, failure: Failure) -> None:
        """Send the other hosts why this one ends, past its state machine, which has failed."""
        end = End(failure.result) if self._coordinates else Failed(self.state.attempt, failure)
        self._send(tuple(self._connections), end)

    def happens(self, event: Any) -> None:
        """Take an event in, and do what is decided: all of that before the next event."""
        self._events.append(event)
        if not self._is_acting:
            self._act(())

    def _act(self, actions: tuple[Action, ...]) -> None:
        self._is_acting = True
        try:
            for action in actions:
                self._do(action)
            while self._events:
                for action in self._decide(self._events.popleft()):
                    self._do(action)
        finally:
            self._is_acting = False

    def _decide(self, event: Any) -> tuple[Action, ...]:
        before, now = self.state, self._system.now()
        actions: tuple[Action, ...]
        self.state, actions = self._machine.step(before, event, now)
        self._decided(before, event, self.state, now)
        if self._job.options.verbose:
            line = described("hosts", before, event, self.state, actions, now - self._began)
            if line:
                self._system.log(line)
        return actions

    def close(self) -> None:
        """Close all connections (Connection.close)."""
        if self._listener:
            self._listener.close()
        for host in list(self._connections):
            self._drop(host)
        for connection in self._given_up:
            connection.close()

    # Who is alive.

    def _begin_alive(self) -> None:
        self._send_alive_at = min(self._send_alive_at, self._system.now() + _ALIVE_SECONDS)
        self._check_at = min(self._check_at, self._send_alive_at)

    def _check_silence(self, now: float) -> None:
        """Send that this launcher runs, and find those that do not."""
        late = now - self._check_at
        if now >= self._send_alive_at:
            # Where the network pauses it is probed; what is sent might be tried again too late.
            self._send([host for host in self._connections if not self._is_silent(host)], Alive())
            self._send_alive_at = now + _ALIVE_SECONDS
        for connection in list(self._connections.values()):
            if late > _LATE_SECONDS:
                connection.received_at = min(now, connection.received_at + late)
            if now >= connection.received_at + self._silence:
                self._give_up(connection)
            connection.give_time_again()
        connections = self._connections.values()
        silent_at = (one.received_at + self._silence for one in connections)
        early_at = (now + _RECHECK_SECONDS for one in connections if one.gives_up_early)
        self._check_at = min((self._send_alive_at, *silent_at, *early_at))

    def _is_silent(self, host: str) -> bool:
        with contextlib.suppress(OSError):  # it has ended, as is about to be read
            return self._connections[host].is_silent
        return False

    def _give_up(self, connection: Connection) -> None:
        """Lose a host whose launcher is silent.

        The connection stays: if the launcher continues, it reads there how the job has ended.
        """
        host = connection.host
        self._given_up.append(connection)
        self.happens(Lost(host, f"its launcher has not answered for {self._silence:g} s"))
        if self._connections.get(host) is connection:
            del self._connections[host]
            self._system.selector.unregister(connection)

    # What is done.

    def _do(self, action: Action) -> None:
        if isinstance(action, events.Command):
            if isinstance(action.message, End) and self._coordinates:
                for connection in self._given_up:
                    connection.send(encoded(to_wire(action.message)))
            self._command(action.message)
        elif isinstance(action, Log):
            self._system.log(action.line)
        elif isinstance(action, events.Send):
            self._send(action.hosts, action.message)
        elif isinstance(action, events.Report):
            self._send((self._job.coordinator,), action.message)
        elif isinstance(action, events.Admit):
            self._admit(self._arrived.pop(action.conn), action.host)
        elif isinstance(action, events.Refuse):
            connection = self._arrived.pop(action.conn)
            connection.send(encoded(to_wire(action.message)))
            connection.close()
        elif isinstance(action, events.Listen):
            self._listen()
        elif isinstance(action, events.EndListening):
            if self._listener:
                self._listener.close()
        elif isinstance(action, events.Connect):
            address = self._job.cluster.address(self._job.coordinator)
            port, then = self._job.options.peer_port, self._connected
            self._system.connect(address, port, action.seconds, then)
        elif isinstance(action, events.Disconnect):
            self._drop(action.host)
        else:
            _unknown(action)

    def _listen(self) -> None:
        self._listener = Listener(
            *(self._job, self._system, self._connections, self._arrives, self.happens)
        )
        self._listener.tick()

    def _send(self, hosts: Sequence[str], message: Message) -> None:
        line = encoded(to_wire(message))
        for host in hosts:
            connection = self._connections.get(host)
            if connection:
                connection.send(line)
                if connection.gives_up_early:
                    self._check_at = min(self._check_at, self._system.now() + _RECHECK_SECONDS)

    def _admit(self, connection: Connection, host: str) -> None:
        connection.host, connection.received_at = host, self._system.now()
        self._connections[host] = connection
        self.own_address = connection.own_address
        self._system.selector.register(connection, EVENT_READ, lambda: self._read(connection))
        if self._coordinates:
            self._begin_alive()

    def _drop(self, host: str) -> None:
        connection = self._connections.pop(host, None)
        if connection:
            self._system.selector.unregister(connection)
            connection.close()

    # What happens on connections.

    def _arrives(self, connection: Connection, hello: Hello, more: list[dict[str, Any]]) -> None:
        conn = id(connection)
        self._arrived[conn] = connection
        self.happens(events.Arrived(conn, connection.address, hello))
        if connection.host:
            self._read_on(connection, more)

    def _connected(self, what: socket.socket | str) -> None:
        try:
            timeout = self._job.options.host_timeout
            connection = Connection(what, timeout) if not isinstance(what, str) else None
        except OSError:
            assert not isinstance(what, str)
            what.close()
            connection, what = None, "it does not answer"
        if connection:
            self._admit(connection, self._job.coordinator)
            self.happens(events.Connected())
        else:
            self.happens(events.Unreachable(str(what)))

    def _read(self, connection: Connection) -> None:
        if connection.closed_by:
            return  # by what came before it
        messages = connection.read()
        connection.received_at = self._system.now()
        self._read_on(connection, messages)
        if connection.closed_by and self._connections.get(connection.host) is connection:
            self._drop(connection.host)
            self.happens(Lost(connection.host, connection.closed_by))

    def _read_on(self, connection: Connection, messages: list[dict[str, Any]]) -> None:
        host = connection.host
        for message in messages:
            if self._connections.get(host) is not connection:
                return  # it was closed by what came before it
            try:
                if self._coordinates:
                    received: Any = from_member(message)
                else:
                    received = from_coordinator(message, self._job.cluster.hosts)
            except ValueError:
                continue  # what is not valid is ignored
            if isinstance(received, Welcome):
                self._begin_alive()
            if not isinstance(received, Alive):
                self._received(host, received)

    def _received(self, host: str, message: Any) -> None:
        """Take a message in; it may name no ranks that the job does not have."""
        if isinstance(message, NoProgressReport):
            message = message._replace(ranks=progress.within(message.ranks, self.world))
        elif isinstance(message, HostStacks) and self.world:
            message = message._replace(ranks=stacks.within(message.ranks, self.world))
        self.happens(Received(host, message))


def _unknown(action: NoReturn) -> NoReturn:
    """Have mypy find actions that nothing carries out."""
    raise TypeError(action)
