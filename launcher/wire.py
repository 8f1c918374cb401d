"""One connection between two launchers: lines of JSON in and out, of which nothing is waited for.

peers.py has the protocol.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Mapping
from typing import Any, Callable

LINE_LIMIT = 1 << 16  # bytes


class Wire:
    """One end of a connection, whose selector calls on_data(wire) when `read` is due.

    Attributes: `host`, whose it is ("" if unknown); `closed_by`, why it is closed ("": it is not).
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
        self._rest = b""
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
        selector.register(connection, selectors.EVENT_READ, lambda: on_data(self))

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message: small ones, few enough that the kernel takes each whole."""
        if self.closed_by:
            return
        line = json.dumps(message).encode() + b"\n"
        try:
            whole = self._socket.send(line) == len(line)
        except BlockingIOError:
            whole = False
        except OSError:
            return  # read() will tell
        if not whole:
            self.close("it does not listen")

    def read(self) -> list[Mapping[str, Any]]:
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
            self.close("its launcher ended without a word")
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if len(self._rest) > LINE_LIMIT or not all(isinstance(m, dict) for m in messages):
            self.close("it said what no launcher says")
            return []
        return messages

    def close(self, why: str) -> None:
        """Hang up; what was said before still arrives."""
        if not self.closed_by:
            self.closed_by = why
            self._selector.unregister(self._socket)
            self._socket.close()
