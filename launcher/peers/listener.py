"""Where the coordinator takes connections until all hosts have joined, and how many it can have.

A connection is pending until its hello has come. What breaks a rule is closed, and changes nothing
for the others. When there is no room, all pending connections get `Later` and are closed: so silent
ones hold it for a moment alone, and a host that was behind them connects again.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Sized
from selectors import EVENT_READ
from typing import Any, Callable

from launcher.host.system import System
from launcher.job.job import Job
from launcher.peers.connection import Connection
from launcher.peers.events import CannotListen, TooFewFiles
from launcher.peers.messages import Hello, Later, from_stranger, to_wire
from launcher.text.protocol import encoded

PENDING = 64  # pending connections that there is room for, besides those of missing hosts
_MOST_ACCEPTED = 100  # connections in one turn, before anything else has its own
_DESCRIPTORS = 14  # for what is opened later: lookups, the start of torchrun, ranks
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # descriptors, or memory
_PAUSE_SECONDS = 0.05  # before connections are taken again, if there was no room
_RETRY_SECONDS = 1  # between two tries to listen
# For another program to give the port back; others need that long to see it, too.
_LISTEN_SECONDS = 3


class Listener:
    """Calls arrived(connection, hello, the messages behind that), and happens(event).

    `connections` are those of hosts, which count for the room that there is.
    """

    def __init__(
        self,
        job: Job,
        system: System,
        connections: Sized,
        arrived: Callable[[Connection, Hello, list[dict[str, Any]]], None],
        happens: Callable[[Any], None],
    ) -> None:
        self._job, self._system = job, system
        self._connections, self._arrived, self._happens = connections, arrived, happens
        self._sockets: list[socket.socket] = []
        self._pending: dict[Connection, None] = {}  # in their order
        self._is_paused = True
        self.own_name_resolves = True
        needs = len(job.members) + _DESCRIPTORS
        files, used = system.make_room(needs + PENDING)
        self._room = max(1, files - used - _DESCRIPTORS)
        self._shortage = TooFewFiles(files, used + needs) if files < used + needs else None
        self._listen_deadline = system.now() + min(_LISTEN_SECONDS, job.options.start_timeout)
        self._listen_at = system.now()
        self._resume_at = math.inf

    def due(self) -> float:
        """Return when `tick` is due; infinite: never."""
        return min(self._listen_at, self._resume_at)

    def tick(self) -> None:
        """Do what is due."""
        now = self._system.now()
        if now >= self._listen_at:
            self._listen(now)
        if now >= self._resume_at:
            for connection in list(self._pending):
                connection.send(encoded(to_wire(Later())))
                self._drop(connection)
            self._resume()

    def close(self) -> None:
        """Listen no longer; close pending connections."""
        self._pause()
        self._listen_at = self._resume_at = math.inf
        for listening in self._sockets:
            listening.close()
        self._sockets = []
        for connection in list(self._pending):
            self._drop(connection)

    def _listen(self, now: float) -> None:
        job = self._job
        self._listen_at = math.inf
        try:
            address = job.cluster.address(job.current_host)
            self._sockets, self.own_name_resolves = self._system.listen(
                address, job.options.peer_port
            )
        except OSError as error:
            self._listen_at = now + _RETRY_SECONDS
            if error.errno != errno.EADDRINUSE or now >= self._listen_deadline:
                self._happens(CannotListen(os.strerror(error.errno or 0)))
            return
        for listening in self._sockets:
            listening.setblocking(False)
        self._resume()
        if self._shortage:
            self._happens(self._shortage)

    def _resume(self) -> None:
        self._resume_at = math.inf
        if self._is_paused:
            self._is_paused = False
            for listening in self._sockets:
                self._system.selector.register(
                    listening, EVENT_READ, lambda to=listening: self._accept(to)
                )

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            for listening in self._sockets:
                self._system.selector.unregister(listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_MOST_ACCEPTED):
            if self._is_paused:
                return  # since another of the sockets found no room, or all have joined
            if len(self._connections) + len(self._pending) >= self._room:
                break
            try:
                accepted, _ = listening.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    break
                return  # none remain, or one that has ended already (accept(2))
            try:
                connection = Connection(accepted, self._job.options.host_timeout)
            except OSError:
                accepted.close()
                continue
            self._pending[connection] = None
            self._system.selector.register(
                connection, EVENT_READ, lambda of=connection: self._read(of)
            )
            self._read(connection)  # its hello is mostly here, too
        else:
            return
        self._pause()
        self._resume_at = self._system.now() + _PAUSE_SECONDS

    def _read(self, connection: Connection) -> None:
        if connection not in self._pending:
            return
        messages = connection.read()
        if connection.closed_by:
            self._drop(connection)
        elif messages:
            try:
                hello = from_stranger(messages[0])
            except ValueError:
                self._drop(connection)  # not from a launcher
                return
            del self._pending[connection]
            self._system.selector.unregister(connection)
            self._arrived(connection, hello, messages[1:])

    def _drop(self, connection: Connection) -> None:
        del self._pending[connection]
        self._system.selector.unregister(connection)
        connection.close()
