"""One TCP connection between two launchers: read and write it without blocking."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
from typing import Any, Callable

from launcher.peers.events import CLOSED, NO_MESSAGE
from launcher.text.protocol import LineSocket, decoded

LINE_LIMIT = 1 << 16  # bytes
_PROBES = 7  # of TCP's keep-alive, in --launcher-host-timeout
_BUFFER = 1 << 18  # bytes that may wait to be acknowledged


class Connection(LineSocket):
    """One end; `host` is the host at the other end, "" until that has said its name.

    `closed_by` is why it is closed ("": it is not); `received_at` is when data last arrived,
    infinite if none has. The connection ends if the other end's kernel does not answer for
    `timeout` seconds. Raises OSError, and closes the socket, if the other end has closed it
    already.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout: int,
        selector: selectors.BaseSelector,
        read_it: Callable[[Any], None],
    ) -> None:
        self.host = self.closed_by = ""
        self.received_at = math.inf
        self._stopped_reading = False  # by the other end
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
        super().__init__(connection, LINE_LIMIT, selector, read_it)

    @property
    def address(self) -> str:
        """The other end's address."""
        try:
            return _plain(self.socket.getpeername()[0])
        except OSError:
            return "an address that is gone"

    def send(self, line: bytes) -> bool:
        """Send a line; there are so few that the kernel takes each line whole.

        The longest hold ranks' stacks; the buffer has room for several unacknowledged ones.
        """
        with contextlib.suppress(OSError):  # messages() reports it
            if not self._stopped_reading and not super().send(line):
                self._stopped_reading = True
                self.socket.shutdown(socket.SHUT_RDWR)  # messages() is due, and reports it
        return not self._stopped_reading

    def messages(self) -> list[dict[str, Any]]:
        """Return the received messages, all valid; check `closed_by` afterwards."""
        try:
            return [decoded(line) for line in self.read()]
        except (EOFError, ConnectionResetError):
            self.closed_by = "it stopped reading" if self._stopped_reading else CLOSED
        except OSError:
            self.closed_by = "it stopped answering"
        except ValueError:
            self.closed_by = NO_MESSAGE
        return []

    def close(self) -> None:
        """Close it."""
        self.closed_by = self.closed_by or "this launcher has closed it"
        super().close()


def _plain(address: str) -> str:
    """Return an IPv4 address without its IPv6 form, which sockets for both use."""
    return address.removeprefix("::ffff:")
