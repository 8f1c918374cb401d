"""Where the first host takes connections, and how many it can have."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Sized
from selectors import EVENT_READ, BaseSelector
from typing import Callable

from launcher.names import is_literal
from launcher.peers import addresses
from launcher.peers.events import CannotListen, Job, Listening, TooFewFiles
from launcher.text import is_loopback

PENDING = 64  # pending connections that there is room for, besides those of missing hosts
_AT_ONCE = 100  # connections that are accepted before anything else has its turn
_DESCRIPTORS = 14  # for what is opened later: look-ups, the start of torchrun, ranks
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # descriptors, or memory
_OWN_NAME = 0.2  # s for a look-up of this host's own name, which seldom takes any longer


class Listener:
    """Listens until it is closed; `take(connection)` is called for each that has come.

    It pauses, and calls `full()`, if there is no room for more `connections` than there are, or
    no descriptor is left. It raises this process's limit on open files, if it has to.
    """

    def __init__(
        self,
        job: Job,
        selector: BaseSelector,
        connections: Sized,
        take: Callable[[socket.socket], object],
        full: Callable[[], None],
    ) -> None:
        self._port = job.port
        self._selector = selector
        self._connections = connections
        self._take = take
        self._full = full
        self._sockets: list[socket.socket] = []
        self._is_paused = True
        self._own, self._name_leads_here = own_addresses(job.address(job.current_host))
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd")) - 1 + _DESCRIPTORS  # 1: of the listing itself
        self._needs = used + len(job.others)
        self._files = self._make_room(self._needs + PENDING)
        self._room = max(1, self._files - used)

    def _make_room(self, wanted: int) -> int:
        """Return how many descriptors this process can have."""
        soft, hard = (wanted if limit == resource.RLIM_INFINITY else limit for limit in self._limit)
        files = min(wanted, hard)
        if files > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, self._limit[1]))
        return files

    def give_back_limit(self, pid: int) -> None:
        """Give a child the limit on open files that this process had before."""
        with contextlib.suppress(OSError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self._limit)

    @property
    def shortage(self) -> TooFewFiles | None:
        """TooFewFiles if this process cannot have enough descriptors, else None."""
        return TooFewFiles(self._files, self._needs) if self._files < self._needs else None

    def listen(self) -> Listening | CannotListen:
        """Listen on the address of this host's name; if it has none such, on all of its own."""
        try:
            try:
                self._sockets = addresses.listen(self._own, self._port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE or not self._own:
                    raise
                # The name resolves to a proxy's address, or to an outdated one.
                self._name_leads_here = False
                self._sockets = addresses.listen([], self._port)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            return CannotListen(why, taken=error.errno == errno.EADDRINUSE)
        for listening in self._sockets:
            listening.setblocking(False)
        self.resume()
        return Listening(self._name_leads_here)

    def resume(self) -> None:
        """Take connections again."""
        if self._is_paused:
            self._is_paused = False
            for listening in self._sockets:
                self._selector.register(
                    listening, EVENT_READ, lambda to=listening: self._accept(to)
                )

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            for listening in self._sockets:
                self._selector.unregister(listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if self._is_paused:
                return  # since another of the sockets found no room
            if len(self._connections) >= self._room:
                break
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if error.errno in _NO_MORE:
                    break
                return  # none are left, or one that has ended already (accept(2))
            self._take(connection)
        else:
            return
        self._pause()
        self._full()

    def close(self) -> None:
        """Listen no longer."""
        self._pause()
        for listening in self._sockets:
            listening.close()
        self._sockets = []


def own_addresses(host: str) -> tuple[list[str], bool]:
    """Return what to listen on, [] for all addresses, and whether the host's name has an address.

    A host's own name may lead nobody else to it, as Debian's 127.0.1.1 in /etc/hosts, or have no
    address on this host alone.
    """
    if is_literal(host):
        return [host], True
    own = addresses.look_up_within(host, _OWN_NAME)
    return [] if any(map(is_loopback, own)) else own, bool(own)
