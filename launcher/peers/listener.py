"""Where the coordinator accepts connections until all hosts have joined."""

from __future__ import annotations

import errno
import math
import os
import socket
from typing import Callable

from launcher.host.system import System
from launcher.job.job import Job
from launcher.peers.connection import Connection
from launcher.result.causes import change_port
from launcher.text.protocol import Lobby

STRANGERS = 64  # connections that fit, besides those of the other hosts
_DESCRIPTORS = 14  # for later needs: lookups, the start of torchrun, ranks
_RETRY_SECONDS = 1  # between two tries to listen
# For another program to release the port; other programs need that long to see it, too.
_LISTEN_SECONDS = 3


class Listener:
    """Listens, and accepts connections; connection_on(socket) makes each (Lobby).

    `listen` is due at `listen_at`; infinite: never. Calls cannot(why) if it cannot listen, or
    accept all hosts.
    """

    def __init__(
        self,
        job: Job,
        system: System,
        connection_on: Callable[[socket.socket], Connection | None],
        cannot: Callable[[str], None],
    ) -> None:
        self._job, self._system, self._cannot = job, system, cannot
        self._room = len(job.members) + STRANGERS
        self._lobby = Lobby(system.selector, connection_on, self._room)
        self.own_name_resolves = True
        self._deadline = system.now() + min(_LISTEN_SECONDS, job.options.start_timeout)
        self.listen_at = math.inf

    def listen(self) -> None:
        """Start listening; try again in a while if another program has the port."""
        job, now = self._job, self._system.now()
        self.listen_at = math.inf
        try:
            address = job.cluster.address(job.current_host)
            sockets, self.own_name_resolves = self._system.listen(address, job.options.peer_port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and now < self._deadline:
                self.listen_at = now + _RETRY_SECONDS
            else:
                seen = (
                    f"{job.current_host} cannot listen on port {job.options.peer_port} for the "
                    f"launchers of the other hosts ({os.strerror(error.errno or 0)})"
                )
                self._cannot(change_port(seen))
            return
        self._lobby.listen(*sockets)
        files, used = self._system.open_files()
        needs = used + self._room + _DESCRIPTORS
        if files < needs:
            self._cannot(
                f"{job.current_host} can have {files} files open (ulimit -n), but the connections "
                f"of {job.cluster.nnodes} hosts need {needs}; raise that limit."
            )

    def close(self) -> None:
        """Listen no longer, and close the connections of strangers."""
        self.listen_at = math.inf
        self._lobby.close()
