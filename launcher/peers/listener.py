"""Where the coordinator accepts connections until all hosts have joined."""

from __future__ import annotations

import errno
import functools
import math
import os
import socket
from selectors import EVENT_READ
from typing import Callable

from launcher.host.system import System
from launcher.job.job import Job
from launcher.result.causes import change_port

STRANGERS = 64  # connections that fit, besides those of the other hosts
_DESCRIPTORS = 14  # for later needs: lookups, the start of torchrun, ranks
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # descriptors, or memory
_RETRY_SECONDS = 1  # between two tries to listen
# For another program to release the port; other programs need that long to see it, too.
_LISTEN_SECONDS = 3


class Listener:
    """Calls accepted(socket), and cannot(why) if it cannot listen, or accept all hosts.

    `listen` is due at `listen_at`; infinite: never. `room` is how many connections fit.
    """

    def __init__(
        self,
        job: Job,
        system: System,
        accepted: Callable[[socket.socket], None],
        cannot: Callable[[str], None],
    ) -> None:
        self._job, self._system, self._accepted, self._cannot = job, system, accepted, cannot
        self._sockets: list[socket.socket] = []
        self.own_name_resolves = True
        self.room = len(job.members) + STRANGERS
        self._deadline = system.now() + min(_LISTEN_SECONDS, job.options.start_timeout)
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
            if error.errno == errno.EADDRINUSE and now < self._deadline:
                self.listen_at = now + _RETRY_SECONDS
            else:
                self._give_up(error)
            return
        for listening in self._sockets:
            listening.setblocking(False)
            act = functools.partial(self._accept, listening)
            self._system.selector.register(listening, EVENT_READ, act)
        files, used = self._system.open_files()
        needs = used + self.room + _DESCRIPTORS
        if files < needs:
            self._cannot(
                f"{job.current_host} can have {files} files open (ulimit -n), but the connections "
                f"of {job.cluster.nnodes} hosts need {needs}; raise that limit."
            )

    def _give_up(self, error: OSError) -> None:
        self.close()
        seen = (
            f"{self._job.current_host} cannot listen on port {self._job.options.peer_port} for the "
            f"launchers of the other hosts ({os.strerror(error.errno or 0)})"
        )
        self._cannot(change_port(seen))

    def _accept(self, listening: socket.socket) -> None:
        try:
            accepted, _ = listening.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._give_up(error)
            return  # none is waiting, or it has already ended (accept(2))
        self._accepted(accepted)

    def close(self) -> None:
        """Listen no longer."""
        self.listen_at = math.inf
        for listening in self._sockets:
            self._system.selector.unregister(listening)
            listening.close()
        self._sockets = []
