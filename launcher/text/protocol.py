"""The protocol between launchers, and between ranks and their launcher: one JSON object a line."""

from __future__ import annotations

import contextlib
import functools
import json
import selectors
import socket
from collections.abc import Mapping
from typing import Any, Callable

_DIGITS = 18  # at most, of a number: Python reads long numbers slowly


def encoded(message: Mapping[str, Any]) -> bytes:
    """Return the line of a message."""
    return json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> dict[str, Any]:
    """Return the message of a line.

    Raises ValueError if it is not a JSON object, is nested too deep, or holds a number that is
    infinite or huge.
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

    When there is something to read, the selector calls read_it(this). `limit` bounds the bytes of
    an incomplete line.
    """

    def __init__(
        self,
        connection: socket.socket,
        limit: int,
        selector: selectors.BaseSelector,
        read_it: Callable[[Any], None],
    ) -> None:
        connection.setblocking(False)
        self.socket, self._selector = connection, selector
        self._limit, self._incomplete = limit, b""
        selector.register(connection, selectors.EVENT_READ, functools.partial(read_it, self))

    def read(self) -> list[bytes]:
        """Return the lines that have arrived.

        Raises EOFError or OSError if the connection has ended, ValueError beyond the limit.
        """
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        if len(self._incomplete) > self._limit:
            raise ValueError("a line is too long")
        return lines

    def send(self, line: bytes) -> bool:
        """Send a line at once; tell whether the kernel took all of it.

        It does, unless the other end has stopped reading: lines are small and few. Raises OSError
        if the connection has ended.
        """
        try:
            return self.socket.send(line) == len(line)
        except BlockingIOError:
            return False

    def ignore(self) -> None:
        """Read no more."""
        with contextlib.suppress(KeyError, ValueError):  # it is ignored, or closed, already
            self._selector.unregister(self.socket)

    def close(self) -> None:
        """Close it; data sent before arrives, unless received data was not read.

        In that case the kernel resets the connection, and data in flight is lost.
        """
        self.ignore()
        self.socket.close()


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a number is too long")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if number - number != 0:
        raise ValueError("a number is endless")
    return number


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_finite)
