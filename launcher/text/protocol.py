"""The protocol between launchers, and between ranks and their launcher: one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from collections.abc import Mapping
from typing import Any, Callable

_MOST = 1e18  # Python reads long integers slowly, and nothing can be done with infinite numbers


def encoded(message: Mapping[str, Any]) -> bytes:
    """Return the line of a message."""
    return json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> dict[str, Any]:
    """Return the message of a line.

    Raises ValueError if it is not a JSON object, is nested too deep, or has an infinite or huge
    number.
    """
    try:
        message = _DECODER.decode(line.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


class LineSocket:
    """A socket for lines, whose other end is never waited for.

    While it is open it calls take(this, line) for each line; and lost(this, error), once, when the
    connection has ended: an EOFError, an OSError, or a ValueError if an incomplete line has more
    than `limit` bytes.
    """

    is_open = True

    def __init__(
        self,
        connection: socket.socket,
        limit: int,
        selector: selectors.BaseSelector,
        take: Callable[[Any, bytes], None],
        lost: Callable[[Any, Exception], None],
    ) -> None:
        connection.setblocking(False)
        self.socket, self._selector, self._limit = connection, selector, limit
        self._take, self._lost, self._incomplete = take, lost, b""
        selector.register(connection, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        """Read what has arrived."""
        try:
            if not (data := self.socket.recv(1 << 16)):
                raise EOFError
            *lines, self._incomplete = (self._incomplete + data).split(b"\n")
            if len(self._incomplete) > self._limit:
                raise ValueError("a line is too long")
        except BlockingIOError:
            return
        except (EOFError, OSError, ValueError) as error:
            self._lost(self, error)
            return
        for line in lines:
            if self.is_open:  # a line before it may have closed it
                self._take(self, line)

    def send(self, line: bytes) -> bool:
        """Send a line at once; return False if the other end has stopped reading.

        Otherwise the kernel takes it: lines are small and few. If the connection has ended, the
        next read finds that.
        """
        try:
            return self.socket.send(line) == len(line)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def ignore(self) -> None:
        """Read no more."""
        with contextlib.suppress(KeyError, ValueError):  # it is ignored, or closed, already
            self._selector.unregister(self.socket)

    def close(self) -> None:
        """Close it; data sent before arrives, unless received data was not read.

        In that case the kernel resets the connection, and data in flight is lost.
        """
        self.is_open = False
        self.ignore()
        self.socket.close()


def _number(digits: str) -> float:
    number = float(digits)
    if not abs(number) < _MOST:
        raise ValueError("a number is too large")
    return int(digits) if digits.lstrip("-").isdecimal() else number


_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=_number)
