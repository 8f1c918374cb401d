"""One TCP connection between two launchers: how it is read and written; none of it blocks."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
from typing import Any

from launcher.peers.events import CLOSED, NO_MESSAGE
from launcher.text.protocol import Lines, decoded, send

LINE_LIMIT = 1 << 16  # bytes
_PARTS = 14  # of --launcher-host-timeout; in each, one probe of TCP's keep-alive goes out
# In such parts:
_LATER = 2  # than that time a connection is given up, so that its last probe can be answered
_LATEST = 4  # the same if something was sent meanwhile
_LEAST = 2  # that what is sent may wait
RTO_MAX_MS = 44  # linux/tcp.h, from Linux 6.15 on: tries to send again get no rarer than that


class Connection:
    """One end; `host` is who is at the other, "" while that is not known.

    `closed_by` is why it is closed ("": it is not); `received_at` is when something has come. The
    other end may be unreachable for `timeout` seconds; 2 to 4 probes later the connection ends.
    Raises OSError if it is closed already.
    """

    def __init__(self, connection: socket.socket, timeout: int) -> None:
        self.host = ""
        self.closed_by = ""
        self.received_at = -math.inf
        self._socket = connection
        self._lines = Lines(LINE_LIMIT)
        self._stopped_reading = False  # the other end
        connection.setblocking(False)
        part = -(-timeout // _PARTS)  # s
        self._timeout, self._part = 1000 * timeout, 1000 * part  # ms
        self.gives_up_early = False  # since the other end was silent when something was sent
        self._give_up_after(self._usual)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, part),
            (socket.TCP_KEEPINTVL, part),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, RTO_MAX_MS, self._part)
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
        of that, though probes may have been in vain for long. A little it may wait in any case: a
        machine that was suspended has heard nothing for long, and all is well.
        """
        unacknowledged, silent = self._heard()
        if not unacknowledged:
            left = self._timeout + _LATEST * self._part - silent
            left = max(left, _LEAST * self._part)
            self.gives_up_early = left < self._usual
            self._give_up_after(min(left, self._usual))

    def give_time_again(self) -> None:
        """Give the other end all of its time again, if it has been heard since.

        The kernel would keep the short time, also for its probes.
        """
        with contextlib.suppress(OSError):  # read() finds it
            if self.gives_up_early and not self.is_silent:
                self._give_up_after(self._usual)
                self.gives_up_early = False

    @property
    def is_silent(self) -> bool:
        """Whether probes have had no answer, and nothing else has come. Raises OSError."""
        return self._heard()[1] > 2 * self._part

    @property
    def _usual(self) -> int:
        return self._timeout + _LATER * self._part

    def _give_up_after(self, silence: int) -> None:
        """Have the kernel give up after so many ms without an answer to probes or what was sent."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence)

    def _heard(self) -> tuple[int, int]:
        """Return how many packets are not acknowledged, and how long ago something came (ms).

        tcpi_unacked, tcpi_last_data_recv, tcpi_last_ack_recv (linux/tcp.h, struct tcp_info).
        """
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        unacknowledged, data, answer = (
            int.from_bytes(info[at : at + 4], sys.byteorder) for at in (24, 52, 56)
        )
        return unacknowledged, min(data, answer)

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
