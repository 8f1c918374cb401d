"""Where the first host listens, and who has connected but not said who it is (first_host.py)."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import resource
import socket
import time
from collections.abc import Callable
from selectors import EVENT_READ, BaseSelector

from launcher.errors import LaunchError
from launcher.job.options import flag
from launcher.peers import addresses
from launcher.peers.channel import TO_GREET
from launcher.peers.connection import Wire

_STRANGERS = 64  # connections that have not said who they are, besides those of missing hosts
_AT_ONCE = 100  # connections that are accepted before anything else has its turn
_DESCRIPTORS = 16  # that all but the channel needs: look-ups, the start of torchrun, ranks
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # descriptors, or memory
# All in seconds.
_PAUSE = 0.05  # before connections are taken again, where there was no room
_LISTEN_RETRY = 1  # between two tries to listen
_OWN_NAME = 0.2  # for this host's own, which seldom takes any longer


class Entrance:
    """Listens until it is closed; selector calls on_wire(wire) for whoever has something to say.

    `expected` hosts are to come; `patience` is how many seconds the port may be taken.

    Attributes: `name_leads_here`, whether this host finds an address of its own for its name;
    `strangers`, who have not said hello, and until when they can; `files`, how many descriptors
    this process can have, and `needs`, how many it needs for all hosts; `listen_at`, when `listen`
    is due (time.monotonic()).
    """

    def __init__(
        self,
        host: str,
        port: int,
        expected: int,
        patience: float,
        selector: BaseSelector,
        on_wire: Callable[[Wire], None],
    ) -> None:
        self.name_leads_here = True
        self.strangers: dict[Wire, float] = {}
        self._host = host
        self._port = port
        self._selector = selector
        self._on_wire = on_wire
        self._taken = 0  # connections that have said who they are
        self._listeners: list[socket.socket] = []
        self.listen_at = 0.0
        self._listen_by = time.monotonic() + patience
        self._resume_at = math.inf
        self._own = self._own_addresses()
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.needs, self.files, self._room = self._make_room(expected)
        self.listen()

    def _own_addresses(self) -> list[str]:
        """Return what to listen on: the address of this host's name, [] for all that it has.

        Its own name may lead nobody else here, as Debian's 127.0.1.1 in /etc/hosts, or have no
        address on this host alone.
        """
        if addresses.is_literal(self._host):
            return [self._host]
        names = addresses.LookUps()
        names.ask([self._host])
        names.wait(self._host, _OWN_NAME)
        own = names.found(self._host) or []
        self.name_leads_here = bool(own)
        return [] if any(map(addresses.is_loopback, own)) else own

    def _make_room(self, expected: int) -> tuple[int, int, int]:
        """Return how many descriptors are needed, and can be had, and how many connections then.

        Raises this process's limit, if it has to.
        """
        used = len(os.listdir("/proc/self/fd")) + _DESCRIPTORS
        wanted = used + expected + _STRANGERS
        soft, hard = (wanted if limit == resource.RLIM_INFINITY else limit for limit in self._limit)
        files = min(wanted, hard)
        if files > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, self._limit[1]))
        return used + expected, files, max(1, files - used)

    def give_back_limit(self, pid: int) -> None:
        """Give a child the limit on open files that this process had before the channel."""
        with contextlib.suppress(OSError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self._limit)

    def listen(self) -> None:
        """Listen on this host's own address; again in a second where that may yet work.

        Raises LaunchError where it does not in time.
        """
        now = time.monotonic()
        self.listen_at = now + _LISTEN_RETRY
        try:
            try:
                self._listeners = addresses.listen(self._own, self._port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE or not self._own:
                    raise
                # The address of its name is none that it has: a proxy's, or one of yesterday.
                self.name_leads_here = False
                self._listeners = addresses.listen([], self._port)
        except OSError as error:
            # The others are to meet whoever listens there, before this host is gone.
            if error.errno == errno.EADDRINUSE and now < self._listen_by:
                return
            raise LaunchError(
                f"{self._host} cannot listen on port {self._port} for the launchers of the other "
                f"hosts ({os.strerror(error.errno or 0)}); choose another with "
                f"{flag('peer_port')}, on every host alike."
            ) from None
        self.listen_at = math.inf
        for listener in self._listeners:
            listener.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self._resume_at = math.inf
        for listener in self._listeners:
            self._selector.register(listener, EVENT_READ, functools.partial(self._accept, listener))

    def _pause(self) -> None:
        """Leave connections with the kernel for a moment, which keeps them and what they say."""
        if math.isinf(self._resume_at):
            self._resume_at = time.monotonic() + _PAUSE
            for listener in self._listeners:
                self._selector.unregister(listener)

    def close(self) -> None:
        """Listen no longer, and hang up on those who have not said who they are."""
        for wire in list(self.strangers):
            self.turn_away(wire, "all are here")
        if math.isinf(self._resume_at):
            for listener in self._listeners:
                self._selector.unregister(listener)
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self._resume_at = self.listen_at = math.inf

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if listener.fileno() < 0:
                return  # the last hello has come in this turn of the loop: nobody else need come
            if self._taken + len(self.strangers) >= self._room:
                self._pause()
                return
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in _NO_MORE:
                    self._pause()
                return  # none are left, or one that has ended already (accept(2))
            try:
                wire = Wire(connection, self._selector, self._on_wire)
            except OSError:
                connection.close()
                continue
            self.strangers[wire] = time.monotonic() + TO_GREET
            self._on_wire(wire)  # its hello is mostly here, too

    def turn_away(self, wire: Wire, why: str) -> None:
        """Hang up on one of the strangers."""
        wire.close(why)
        self.strangers.pop(wire, None)

    def take(self, wire: Wire) -> None:
        """It has said who it is."""
        del self.strangers[wire]
        self._taken += 1

    def times(self) -> list[float]:
        """Return when `tick` is due, on the clock time.monotonic()."""
        return [self._resume_at, *self.strangers.values()]

    def tick(self, now: float) -> None:
        """Hang up on those who have said nothing in time; take connections again."""
        for wire, until in list(self.strangers.items()):
            if now >= until:
                self.turn_away(wire, "said nothing")
        if now >= self._resume_at:
            self._make_way()

    def _make_way(self) -> None:
        """Take connections again; those who have said nothing yet may come back later."""
        for wire in list(self.strangers):
            wire.say({"later": True})
            self.turn_away(wire, "said nothing, and there was no more room")
        self._resume()
