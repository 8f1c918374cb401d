"""One TCP connection between two launchers: how it is read and written; none of it blocks."""

from __future__ import annotations

import contextlib
import math
import socket
from typing import Any

from launcher.peers.events import CLOSED, NO_MESSAGE
from launcher.text.protocol import Lines, decoded, send

LINE_LIMIT = 1 << 16  # bytes
_PROBES = 7  # of TCP's keep-alive, in --launcher-host-timeout
_BUFFER = 1 << 18  # bytes that may wait to be acknowledged


class Connection:
    """One end; `host` is who is at the other, "" while that is not known.

    `closed_by` is why it is closed ("": it is not); `received_at` is when something has come,
    infinite if nothing has. The connection ends when the other end's kernel has not answered for
    `timeout` seconds.
    Raises OSError if it is closed already.
    """

    def __init__(self, connection: socket.socket, timeout: int) -> None:
        self.host = ""
        self.closed_by = ""
        self.received_at = math.inf
        self._socket = connection
        self._lines = Lines(LINE_LIMIT)
        self._stopped_reading = False  # the other end
        connection.setblocking(False)
        between = max(1, timeout // _PROBES)
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
            # The kernel sends no probes while what was sent is not acknowledged. (ms)
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * timeout),
        ):
            connection.setsockopt(level, option, value)
        self.own_address = _plain(connection.getsockname()[0])

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """Where the other end is."""
        try:
            return _plain(self._socket.getpeername()[0])
        except OSError:
            return "an address that is gone"

    def send(self, line: bytes) -> None:
        """Send a line, of which there are so few that the kernel takes each whole.

        The longest have stacks of ranks; the buffer has room for several, not acknowledged yet.
        """
        if self.closed_by or self._stopped_reading:
            return
        with contextlib.suppress(OSError):  # read() finds it
            self._stopped_reading = not send(self._socket, line)
            if self._stopped_reading:
                self._socket.shutdown(socket.SHUT_RDWR)  # read() is due, and finds it

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come, all of them valid; it may have ended then."""
        try:
            data = self._socket.recv(LINE_LIMIT)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        except OSError:
            self.closed_by = "it stopped answering"
            return []
        if not data:
            self.closed_by = "it stopped reading" if self._stopped_reading else CLOSED
            return []
        try:
            return [decoded(line) for line in self._lines.feed(data)]
        except ValueError:
            self.closed_by = NO_MESSAGE
            return []

    def close(self) -> None:
        """Close it; what was sent before arrives, unless something is here that was not read.

        Then the kernel resets the connection, which costs what has not arrived by then.
        """
        self.closed_by = self.closed_by or "this launcher has closed it"
        self._socket.close()


def _plain(address: str) -> str:
    """Return an IPv4 address as such, which a socket for both gives within IPv6."""
    return address.removeprefix("::ffff:")
