"""Host names and addresses, IPv4 and IPv6."""

from __future__ import annotations

import socket
from typing import Any

SocketAddress = tuple[Any, ...]  # as getaddrinfo gives it


def look_up(host: str, port: int = 0) -> list[tuple[socket.AddressFamily, SocketAddress]]:
    """Return the families and addresses of a name, none if it does not resolve.

    May block for many seconds.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # A line that is twice in /etc/hosts gives its address twice.
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def is_literal(host: str) -> bool:
    """Tell whether a host's name is an address."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):
            continue
        return True
    return False
