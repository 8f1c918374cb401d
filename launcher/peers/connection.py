"""One TCP connection between two launchers: how it is read and written; none of it blocks."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
from typing import Any

from launcher.peers.events import HUNG_UP, NO_MESSAGE
from launcher.text.protocol import Lines, decoded, send

LINE_LIMIT = 1 << 16  # bytes
_PROBES = 3  # of TCP's keep-alive, until a connection is given up


class Connection:
    """One end; `host` is who is at the other, "" while that is not known.

    `closed_by` is why it is closed ("": it is not); `received_at` is when something has come. The
    connection ends if no packet is answered for `timeout` seconds, or up to 5 of 14 more if one is
    sent in that time. Raises OSError if it is closed already.
    """

    def __init__(self, connection: socket.socket, timeout: int) -> None:
        self.host = ""
        self.closed_by = ""
        self.received_at = -math.inf
        self._socket = connection
        self._lines = Lines(LINE_LIMIT)
        self._stopped_reading = False  # the other end
        connection.setblocking(False)
        interval = max(1, 3 * timeout // 14)  # 3 s of 14
        self._timeout, self._interval = 1000 * timeout, 1000 * interval  # ms
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, timeout - _PROBES * interval),
            (socket.TCP_KEEPINTVL, interval),
            (socket.TCP_KEEPCNT, _PROBES),
            (socket.TCP_USER_TIMEOUT, self._timeout),  # for what was sent and not acknowledged
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
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
            self._count_silence()
            self._stopped_reading = not send(self._socket, line)
            if self._stopped_reading:
                self._socket.shutdown(socket.SHUT_RDWR)  # read() is due, and finds it

    def _count_silence(self) -> None:
        """Have what is about to be sent wait only for what is left of the time.

        While something is not acknowledged the kernel sends no probes and counts from the sending
        of that, though probes may have been in vain for long. As long as a probe it may wait in any
        case: a machine that was suspended has heard nothing for long, and all is well.
        """
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        # tcpi_unacked, tcpi_last_ack_recv in ms (linux/tcp.h, struct tcp_info)
        unacknowledged, silent = (
            int.from_bytes(info[at : at + 4], sys.byteorder) for at in (24, 56)
        )
        if not unacknowledged:
            is_in_doubt = silent > self._timeout - _PROBES * self._interval  # one was not answered
            left = max(self._timeout - silent, self._interval) if is_in_doubt else self._timeout
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, left)

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
            self.closed_by = "it stopped reading" if self._stopped_reading else HUNG_UP
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
