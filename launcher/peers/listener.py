"""Where the coordinator accepts connections until all hosts have joined, and how many fit.

A connection is pending until its hello arrives. A connection that breaks a rule is closed, and the
others do not notice. When there is no room, the oldest pending connection is closed, so idle
connections can block it only briefly; a host whose hello was on its way connects again.
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
from launcher.peers.events import CannotListen
from launcher.peers.messages import Hello, from_stranger
from launcher.result.causes import change_port

PENDING = 64  # pending connections that fit, besides those of missing hosts
_MOST_ACCEPTED = 100  # connections in one turn of the loop
_DESCRIPTORS = 14  # for later needs: lookups, the start of torchrun, ranks
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # descriptors, or memory
_RETRY_SECONDS = 1  # between two tries to listen
# For another program to release the port; other programs need that long to see it, too.
_LISTEN_SECONDS = 3


class Listener:
    """Calls arrived(connection, hello, messages after the hello), and happens(event).

    `connections` are those of hosts, which take up room. `listen` is due at `listen_at`; infinite:
    never.
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
        self._pending: dict[Connection, None] = {}  # oldest first
        self.own_name_resolves = True
        self._room = len(job.members) + PENDING
        self._listen_deadline = system.now() + min(_LISTEN_SECONDS, job.options.start_timeout)
        self.listen_at = math.inf

    def listen(self) -> None:
        """Start listening; try again in a while if another program has the port."""
        job, now = self._job, self._system.now()
        self.listen_at = math.inf
        try:
            address = job.cluster.address(job.current_host)
            self._sockets, self.own_name_resolves = self._system.listen(
                address, job.options.peer_port
            )
        except OSError as error:
            self.listen_at = now + _RETRY_SECONDS
            if error.errno != errno.EADDRINUSE or now >= self._listen_deadline:
                self._cannot(error)
            return
        for listening in self._sockets:
            listening.setblocking(False)
            self._system.selector.register(
                listening, EVENT_READ, lambda to=listening: self._accept(to)
            )
        files, used = self._system.open_files()
        needs = used + self._room + _DESCRIPTORS
        if files < needs:
            text = (
                f"{job.current_host} can have {files} files open (ulimit -n), but the connections "
                f"of {job.cluster.nnodes} hosts need {needs}; raise that limit."
            )
            self._happens(CannotListen(text, may_tell=True))

    def _cannot(self, error: OSError) -> None:
        self.close()
        seen = (
            f"{self._job.current_host} cannot listen on port {self._job.options.peer_port} for the "
            f"launchers of the other hosts ({os.strerror(error.errno or 0)})"
        )
        self._happens(CannotListen(change_port(seen)))

    def close(self) -> None:
        """Listen no longer; close pending connections."""
        self.listen_at = math.inf
        for listening in self._sockets:
            self._system.selector.unregister(listening)
            listening.close()
        self._sockets = []
        for connection in list(self._pending):
            self._drop(connection)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_MOST_ACCEPTED):
            if listening not in self._sockets:
                return  # all have joined
            try:
                accepted, _ = listening.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._cannot(error)
                return  # none is pending, or one has already ended (accept(2))
            try:
                connection = Connection(accepted, self._job.options.host_timeout)
            except OSError:
                accepted.close()
                continue
            if len(self._connections) + len(self._pending) >= self._room:
                self._drop(next(iter(self._pending)))
            self._pending[connection] = None
            self._system.selector.register(
                connection, EVENT_READ, lambda of=connection: self._read(of)
            )
            self._read(connection)  # its hello has usually arrived, too

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
