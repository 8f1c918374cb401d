"""One TCP connection between two launchers, which is never waited for."""

from __future__ import annotations

import contextlib
import math
import socket

from launcher.text.protocol import LineSocket

_PROBES = 7  # of TCP's keep-alive, in --launcher-host-timeout
_BUFFER = 1 << 18  # bytes that may wait to be acknowledged


class Connection(LineSocket):
    """One end; `host` is the host at the other end, "" until that has said its name.

    `own_address` is this end's, known once it is a host's. `received_at` is when a line last
    arrived, infinite if none has.
    """

    limit = 1 << 16  # bytes
    host = own_address = ""
    received_at = math.inf
    _stopped_reading = False  # the other end

    def admit(self, host: str, timeout: int) -> None:
        """Make it a host's; it ends if the kernel there does not answer for `timeout` seconds."""
        self.host, self.is_stranger = host, False
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
        with contextlib.suppress(OSError):  # it has ended already: the next read finds that
            for option, value in options.items():
                self.socket.setsockopt(*option, value)
            self.own_address = _plain(self.socket.getsockname()[0])

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
        if not self._stopped_reading and not super().send(line):
            self._stopped_reading = True
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # the next read finds that
        return not self._stopped_reading

    def why_lost(self, error: Exception) -> str:
        """Return the words for how it has ended."""
        if isinstance(error, ValueError):
            return "it sent an invalid message"
        if isinstance(error, (EOFError, ConnectionResetError)):
            return "it stopped reading" if self._stopped_reading else "its launcher died"
        return "it stopped answering"


def _plain(address: str) -> str:
    """Return an IPv4 address without its IPv6 form, which sockets for both use."""
    return address.removeprefix("::ffff:")
