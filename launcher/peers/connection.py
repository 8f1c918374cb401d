"""One connection between two launchers: lines of JSON in and out, of which nothing is waited for.

peers.py has the protocol, messages.py checks what comes in.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from collections.abc import Mapping
from typing import Any, Callable

from launcher.peers.messages import decoded

LINE_LIMIT = 1 << 16  # bytes


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return what is sent for a message."""
    return json.dumps(message).encode() + b"\n"


class Wire:
    """One end of a connection, whose selector calls on_data(wire) when `read` is due.

    Attributes: `host`, whose it is ("" if unknown); `closed_by`, why it is closed ("": it is not);
    `own_address`, of this end. Raises OSError where the connection is of no use any more.
    """

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        on_data: Callable[[Wire], None],
    ) -> None:
        self.host = ""
        self.closed_by = ""
        self._socket = connection
        self._selector = selector
        self._on_data = on_data
        self._rest = b""
        self._deaf = False  # it does not take what is sent
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
        selector.register(connection, selectors.EVENT_READ, self._on_ready)

    def _on_ready(self) -> None:
        if not self.closed_by:  # by what came before it in the same turn of the loop
            self._on_data(self)

    @property
    def address(self) -> str:
        """Where the other end is."""
        try:
            return _plain(self._socket.getpeername()[0])
        except OSError:
            return "an address that is gone"

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self.send(line_of(message))

    def send(self, line: bytes) -> None:
        """Send a line: small ones, few enough that the kernel takes each whole."""
        if self.closed_by or self._deaf:
            return
        try:
            self._deaf = self._socket.send(line) < len(line)
        except BlockingIOError:
            self._deaf = True
        except OSError:
            return  # read() will tell
        if self._deaf:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # read() is due, and tells

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come; closes the connection where that ends it."""
        try:
            data = self._socket.recv(LINE_LIMIT)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        except OSError:
            self.close("it stopped answering")
            return []
        if not data:
            self.close("it does not listen" if self._deaf else "its launcher ended without a word")
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [decoded(line) for line in lines]
            if len(self._rest) > LINE_LIMIT:
                raise ValueError
        except ValueError:
            self.close("it said what no launcher says")
            return []
        return messages

    def close(self, why: str) -> None:
        """Hang up; what was said before still arrives."""
        if not self.closed_by:
            self.closed_by = why
            self._selector.unregister(self._socket)
            self._socket.close()


def _plain(address: str) -> str:
    """Return an address of version 4 as such, which a socket for both gives within version 6."""
    return address.removeprefix("::ffff:")
