"""One TCP connection between two launchers: read and write it without blocking."""

from __future__ import annotations

import contextlib
import functools
import math
import selectors
import socket
from typing import Any, Callable

from launcher.peers.events import CLOSED, NO_MESSAGE
from launcher.text.protocol import Lines, decoded, send

LINE_LIMIT = 1 << 16  # bytes
_PROBES = 7  # of TCP's keep-alive, in --launcher-host-timeout
_BUFFER = 1 << 18  # bytes that may wait to be acknowledged


class Connection:
    """One end; `host` is the host at the other end, "" until that has said its name.

    `closed_by` is why it is closed ("": it is not); `received_at` is when data last arrived,
    infinite if none has. When there is something to read, the selector calls read_it(this). The
    connection ends if the other end's kernel does not answer for `timeout` seconds.
    Raises OSError, and closes the socket, if the other end has closed it already.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout: int,
        selector: selectors.BaseSelector,
        read_it: Callable[[Connection], None],
    ) -> None:
        self.host = ""
        self.closed_by = ""
        self.received_at = math.inf
        self._socket, self._selector = connection, selector
        self._lines = Lines(LINE_LIMIT)
        self._stopped_reading = False  # by the other end
        connection.setblocking(False)
        between = max(1, timeout // _PROBES)
        options = {
            (socket.SOL_SOCKET, socket.SO_SNDBUF): _BUFFER,
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
            (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): between,
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): between,
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): _PROBES,
            # The kernel sends no probes while sent data is not acknowledged. (ms)
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 1000 * timeout,
        }
        try:
            for option, value in options.items():
                connection.setsockopt(*option, value)
            self.own_address = _plain(connection.getsockname()[0])
        except OSError:
            connection.close()
            raise
        selector.register(self, selectors.EVENT_READ, functools.partial(read_it, self))

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """The other end's address."""
        try:
            return _plain(self._socket.getpeername()[0])
        except OSError:
            return "an address that is gone"

    def send(self, line: bytes) -> None:
        """Send a line; there are so few that the kernel takes each line whole.

        The longest hold ranks' stacks; the buffer has room for several unacknowledged ones.
        """
        if self.closed_by or self._stopped_reading:
            return
        with contextlib.suppress(OSError):  # read() reports it
            self._stopped_reading = not send(self._socket, line)
            if self._stopped_reading:
                self._socket.shutdown(socket.SHUT_RDWR)  # read() is due, and reports it

    def read(self) -> list[dict[str, Any]]:
        """Return the received messages, all valid; check `closed_by` afterwards."""
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

    def ignore(self) -> None:
        """Read no more."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self)

    def close(self) -> None:
        """Close it; data sent before arrives, unless received data was not read.

        In that case the kernel resets the connection, and data in flight is lost.
        """
        self.closed_by = self.closed_by or "this launcher has closed it"
        self.ignore()
        self._socket.close()


def _plain(address: str) -> str:
    """Return an IPv4 address without its IPv6 form, which sockets for both use."""
    return address.removeprefix("::ffff:")
