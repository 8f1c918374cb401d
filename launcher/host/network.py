"""Hosts' names, addresses and connections, IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

from launcher.host.within import within
from launcher.text.words import is_loopback

SocketAddress = tuple[Any, ...]  # as getaddrinfo gives it

_CONNECT_SECONDS = 4  # for an address to accept a connection
_OWN_NAME_SECONDS = 0.2  # for a look-up of this host's own name, which seldom takes any longer
_BACKLOG = 1 << 12  # connections to accept; the kernel allows net.core.somaxconn (listen(2))


def look_up(host: str, port: int = 0) -> list[tuple[socket.AddressFamily, SocketAddress]]:
    """Return the families and addresses of a name; none if it does not resolve.

    May block for many seconds.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # A line that is in /etc/hosts twice yields its address twice.
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def is_literal(host: str) -> bool:
    """Tell whether a host's name is an address."""
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    return False


def listen(host: str, port: int) -> tuple[list[socket.socket], bool]:
    """Listen on the addresses of this host's name; if it has none of them, on all of its own.

    Return the sockets, and whether other hosts may find this host by its name. A host's own name
    may not be reachable from other hosts (Debian's 127.0.1.1 in /etc/hosts), or may have no address
    on this host alone. Raises OSError: EADDRINUSE if the port is taken.
    """
    own = [host]
    if not is_literal(host):
        own = within(_OWN_NAME_SECONDS, lambda: [str(to[0]) for _, to in look_up(host)], [])
        if not own or any(map(is_loopback, own)):
            return listen_on([], port), bool(own)
    try:
        return listen_on(own, port), True
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
    # The name resolves to a proxy's address, or to an outdated one.
    return listen_on([], port), False


def listen_on(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on those of these addresses that this host has; for [], on all of its own.

    Raises OSError: EADDRINUSE if the port is taken at one of them.
    """
    if not addresses:
        return [_listen_on_all(port)]
    listeners: list[socket.socket] = []
    none = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, to in (found for address in addresses for found in look_up(address, port)):
        try:
            listeners.append(socket.create_server(to, family=family, backlog=_BACKLOG))
        except OSError as error:
            none = error  # DNS may have an IPv6 address that this host lacks
            if error.errno == errno.EADDRINUSE:
                for listener in listeners:
                    listener.close()
                raise
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
            pass  # IPv6 may be disabled; a taken port fails for IPv4, too
    return socket.create_server(("", port), backlog=_BACKLOG)


def connected(host: str, port: int) -> socket.socket | str:
    """Return a connection, or why there is none. May block for many seconds."""
    why = f"the name {host} does not resolve"
    for family, address in look_up(host, port):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(address)
        except OSError as error:
            connection.close()
            refused = isinstance(error, ConnectionRefusedError)
            why = "nothing is listening there" if refused else "it does not answer"
        else:
            return connection
    return why
