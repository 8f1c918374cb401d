"""Where the first host listens, and whether names resolve; a look-up can take many seconds."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Callable

from launcher.names import look_up
from launcher.text import NAMED

_THREADS = 2 * NAMED
_BACKLOG = 1 << 12  # the kernel makes it net.core.somaxconn at most (listen(2))


class LookUps:
    """Looks names up side by side, each in a thread that calls tell(host, resolves) at its end.

    `address(host)` is what a host is looked up by.
    """

    def __init__(self, address: Callable[[str], str], tell: Callable[[str, bool], None]) -> None:
        self._address = address
        self._tell = tell
        self._running: set[str] = set()

    def ask(self, hosts: Iterable[str]) -> None:
        """Look names up anew, but those that are being looked up."""
        for host in hosts:
            if host not in self._running and len(self._running) < _THREADS:
                self._running.add(host)
                name = f"look up {host}"
                thread = threading.Thread(target=self._run, args=(host,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads in this container
                    self._running.discard(host)

    def _run(self, host: str) -> None:
        resolves = bool(look_up(self._address(host)))
        self._running.discard(host)
        self._tell(host, resolves)


def look_up_within(host: str, seconds: float) -> list[str]:
    """Return the addresses of a name, none if that takes longer."""
    found: list[str] = []

    def run() -> None:
        found.extend(str(address[0]) for _, address in look_up(host))

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads in this container
        return []
    thread.join(seconds)
    return list(found)


def listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on those of some addresses that this host has, or on all of its own ([]).

    Raises OSError: EADDRINUSE if the port is taken at one of them.
    """
    if not addresses:
        return [_listen_on_all(port)]
    listeners: list[socket.socket] = []
    none = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for address in addresses:
        for family, to in look_up(address, port):
            try:
                listeners.append(socket.create_server(to, family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    for listener in listeners:
                        listener.close()
                    raise
                none = error  # DNS may know an IPv6 address, and the host have none
    if not listeners:
        raise none
    return listeners


def _listen_on_all(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError:
            pass  # IPv6 may be switched off; and a port that is taken is for both
    return socket.create_server(("", port), backlog=_BACKLOG)
