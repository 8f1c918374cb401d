"""Hosts' names, addresses and connections, IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any

from launcher.text.background import within
from launcher.text.words import is_loopback

Address = tuple[socket.AddressFamily, tuple[Any, ...]]  # as getaddrinfo gives both

_CONNECT_SECONDS = 4  # for an address to accept a connection
_OWN_NAME_SECONDS = 0.2  # for a look-up of this host's own name, which seldom takes any longer
_BACKLOG = 1 << 12  # connections to accept; the kernel allows net.core.somaxconn (listen(2))


def look_up(host: str, port: int = 0, flags: int = 0) -> list[Address]:
    """Return the families and addresses of a name; none if it does not resolve.

    May block for many seconds, but not with AI_NUMERICHOST: then only an address resolves.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError):
        return []
    # A line that is in /etc/hosts twice yields its address twice.
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def listen(host: str, port: int) -> tuple[list[socket.socket], bool]:
    """Listen on the addresses of this host's name; if it has none of them, on all of its own.

    Return the sockets, and whether other hosts may find this host by its name. A host's own name
    may not be reachable from other hosts (Debian's 127.0.1.1 in /etc/hosts), or may have no address
    on this host alone. Raises OSError: EADDRINUSE if the port is taken.
    """
    found = within(_OWN_NAME_SECONDS, lambda: look_up(host, port), list[Address]())
    is_address = look_up(host, port, socket.AI_NUMERICHOST)
    if any(is_loopback(to[0]) for _, to in found) and not is_address:
        return [listen_on_all(port)], True
    listeners: list[socket.socket] = []
    for family, to in found:
        try:
            listeners.append(socket.create_server(to, family=family, backlog=_BACKLOG))
        except OSError as error:  # DNS may have an address of a proxy, or one that this host lacks
            if error.errno == errno.EADDRINUSE:
                for listener in listeners:
                    listener.close()
                raise
    return listeners or [listen_on_all(port)], bool(listeners)


def listen_on_all(port: int) -> socket.socket:
    """Listen on all addresses of this host. Raises OSError."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # no IPv6; a taken port fails for IPv4, too
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=_BACKLOG)


def connected(host: str, port: int) -> socket.socket | str:
    """Return a connection, or why there is none. May block for many seconds."""
    try:
        return socket.create_connection((host, port), _CONNECT_SECONDS)
    except (socket.gaierror, UnicodeError):
        return f"the name {host} does not resolve"
    except ConnectionRefusedError:
        return "nothing is listening there"
    except OSError:
        return "it does not answer"
