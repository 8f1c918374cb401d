"""Names of hosts and their addresses, version 4 and 6; a lookup can take many seconds."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any

NAMED = 8  # hosts that one message names; it counts the others
_NAMES_LIMIT = 600  # characters that their names may take, of the failure file's 1,024
_THREADS = 2 * NAMED
_BACKLOG = 1 << 12  # the kernel makes it net.core.somaxconn at most (listen(2))

SocketAddress = tuple[Any, ...]  # as getaddrinfo gives it


def look_up(host: str, port: int = 0) -> list[tuple[socket.AddressFamily, SocketAddress]]:
    """Return the families and addresses of a name, none if it does not resolve; may block long."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # A line that stands twice in /etc/hosts gives its address twice.
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def is_literal(host: str) -> bool:
    """Tell whether a host is called by its address."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):
            continue
        return True
    return False


def is_loopback(address: str) -> bool:
    """Tell whether an address leads no other machine to this one."""
    return address == "::1" or address.startswith("127.")


class LookUps:
    """Looks names up side by side, each in a thread; nobody has to wait for the answers."""

    def __init__(self) -> None:
        self._found: dict[str, Sequence[SocketAddress]] = {}
        self._running: dict[str, threading.Thread] = {}

    def ask(self, hosts: Iterable[str]) -> None:
        """Look names up anew, but those that are being looked up."""
        for host in hosts:
            if host not in self._running and len(self._running) < _THREADS:
                self._found.pop(host, None)
                thread = threading.Thread(target=self._run, args=(host,), daemon=True)
                self._running[host] = thread
                try:
                    thread.start()
                except RuntimeError:  # no more threads in this container
                    del self._running[host]

    def _run(self, host: str) -> None:
        self._found[host] = [address for _, address in look_up(host)]
        del self._running[host]

    def wait(self, host: str, seconds: float) -> None:
        """Wait until a name that was asked for has an answer, or the seconds are over."""
        thread = self._running.get(host)
        if thread:
            thread.join(seconds)

    def found(self, host: str) -> list[str] | None:
        """Return the last answer, None if there is none yet."""
        addresses = self._found.get(host)
        return None if addresses is None else [str(address[0]) for address in addresses]


def listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on those of some addresses that this host has, or on all of its own ([]).

    Raises OSError: EADDRINUSE where the port is taken at one of them.
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
                none = error  # DNS may know an address of version 6, where the host has none
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
            pass  # version 6 may be switched off; and a port that is taken is for both
    return socket.create_server(("", port), backlog=_BACKLOG)


def some_of(hosts: Sequence[str]) -> Sequence[str]:
    """Return as many of the first hosts as a message can name."""
    count, length = 0, 0
    for host in hosts[:NAMED]:
        length += len(host)
        if count and length > _NAMES_LIMIT:
            break
        count += 1
    return hosts[:count]


def counted(words: Sequence[str], more: int) -> str:
    """Return words with commas between, and how many more there are."""
    return ", ".join(words) + (f" and {more} more" if more else "")
