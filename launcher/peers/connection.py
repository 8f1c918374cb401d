"""One TCP connection between two launchers: how it is made, read and written; none of it blocks.

Every other host makes its connection to the first one in a thread: a look-up may take long.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any, Callable

from launcher.errors import LaunchError
from launcher.names import SocketAddress, look_up
from launcher.peers.events import Job, Unreachable
from launcher.protocol import Lines, decoded, send

LINE_LIMIT = 1 << 16  # bytes
_TO_CONNECT = 4  # s for an address to take a connection


class Connection:
    """One end of a connection; `closed_by` is why it is closed ("": it is not).

    Raises OSError if the connection is already closed.
    """

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.closed_by = ""
        self._socket = connection
        self._lines = Lines(LINE_LIMIT)
        self._stopped_reading = False  # the other end
        connection.setblocking(False)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 3),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, 14_000),  # ms, for what was sent and not acknowledged
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
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
        """Send a line, of which there are so few that the kernel takes each whole."""
        if self.closed_by or self._stopped_reading:
            return
        with contextlib.suppress(OSError):  # read() tells
            self._stopped_reading = not send(self._socket, line)
            if self._stopped_reading:
                self._socket.shutdown(socket.SHUT_RDWR)  # read() is due, and tells

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come, all of them valid; `closed_by` tells if it ended."""
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
            self.closed_by = "it stopped reading" if self._stopped_reading else "its launcher died"
            return []
        try:
            return [decoded(line) for line in self._lines.feed(data)]
        except ValueError:
            self.closed_by = "it sent an invalid message"
            return []

    def close(self) -> None:
        """Close it; what was sent before still arrives."""
        self._socket.close()


def _plain(address: str) -> str:
    """Return an IPv4 address as such, which a socket for both gives within IPv6."""
    return address.removeprefix("::ffff:")


def reach(job: Job, wait: float, over: threading.Event, happened: Callable[[Any], None]) -> None:
    """Connect after so many seconds, in a thread; it calls happened(connection or Unreachable).

    Once `over` is set, nobody is told any more. Raises LaunchError if no thread can be started.
    """

    def run() -> None:
        what: Any = Unreachable("it cannot be reached")
        try:
            what = _reached(job, wait, over)
        finally:
            if not over.is_set():
                happened(what)
            elif isinstance(what, socket.socket):
                what.close()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # ulimit -u, or the cgroup's pids.max
        raise LaunchError(f"cannot start a thread ({error}); raise ulimit -u.") from None


def _reached(job: Job, wait: float, over: threading.Event) -> socket.socket | Unreachable:
    if over.wait(wait):
        return Unreachable("this launcher has ended")
    why = f"the name {job.first} does not resolve"
    for family, address in look_up(job.address(job.first), job.port):
        try:
            return _connected(family, address)
        except ConnectionRefusedError:
            why = "nothing listens there"
        except OSError:
            why = "it does not answer"
    return Unreachable(why)


def _connected(family: socket.AddressFamily, address: SocketAddress) -> socket.socket:
    """Return a connection to an address. Raises OSError."""
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(_TO_CONNECT)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
