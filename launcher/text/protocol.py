"""The protocol between launchers, and between ranks and launchers: one JSON object per line."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any, Callable, Generic, TypeVar

_MOST_STRANGERS = 128
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # descriptors, or memory
_NO_ROOM_SECONDS = 0.05
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
    than `limit` bytes. `is_stranger` is for a lobby: the other end may be anybody's.
    """

    limit = 1 << 22  # bytes
    is_open = is_stranger = True

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        take: Callable[[Any, bytes], None],
        lost: Callable[[Any, Exception], None],
    ) -> None:
        connection.setblocking(False)
        self.socket, self._selector = connection, selector
        self._take, self._lost, self._incomplete = take, lost, b""
        selector.register(connection, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        """Read what has arrived."""
        try:
            if not (data := self.socket.recv(1 << 16)):
                raise EOFError
            *lines, self._incomplete = (self._incomplete + data).split(b"\n")
            if len(self._incomplete) > self.limit:
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


T = TypeVar("T", bound=LineSocket)


class Lobby(Generic[T]):
    """Accepts connections, made as `kind`, that call `take` and `lost`.

    connection_on(socket) makes one of a socket from elsewhere.

    There is room for so many, or, with 0, for so many strangers that they take a quarter of the
    descriptors. When there is none, or no descriptor is free, the oldest stranger makes way: so
    idle connections can hide others only briefly.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        kind: type[T],
        take: Callable[[T, bytes], None],
        lost: Callable[[T, Exception], None],
        room: int = 0,
    ) -> None:
        self._selector, self._room = selector, room
        self.connection_on: Callable[[socket.socket], T]
        self.connection_on = lambda accepted: kind(accepted, selector, take, lost)
        self._listeners: tuple[socket.socket, ...] = ()
        self._accepted: list[T] = []

    @property
    def connections(self) -> list[T]:
        """The connections that are open, the oldest first."""
        self._accepted = [each for each in self._accepted if each.is_open]
        return self._accepted

    def listen(self, *listeners: socket.socket) -> None:
        """Accept connections on these sockets from now on."""
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        """Accept pending connections, some at a time, and read what has arrived on them."""
        for listener in self._listeners:
            for _ in range(_MOST_STRANGERS):
                try:
                    accepted, _ = listener.accept()
                except OSError as error:
                    # None waits; it has already ended (accept(2)); or this listener is closed.
                    if error.errno not in _NO_ROOM or not self._is_pending(listener):
                        break
                    if not (strangers := self._strangers()):
                        time.sleep(_NO_ROOM_SECONDS)  # else the loop would turn without a pause
                        return
                    strangers[0].close()
                    continue
                connection = self.connection_on(accepted)
                self._accepted.append(connection)
                if not self._has_room():
                    self._strangers()[0].close()
                connection.read()

    def _is_pending(self, listener: socket.socket) -> bool:
        """Tell whether a connection waits: accept() says first that there is no room for any."""
        return any(key.fileobj is listener for key, _ in self._selector.select(0))

    def _has_room(self) -> bool:
        if self._room:
            return len(self.connections) <= self._room
        quarter = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        return len(self._strangers()) <= min(_MOST_STRANGERS, quarter)

    def _strangers(self) -> list[T]:
        return [each for each in self.connections if each.is_stranger]

    def close(self) -> None:
        """Accept no more, and close the connections of strangers."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = ()
        for stranger in self._strangers():
            stranger.close()


def _number(digits: str) -> float:
    number = float(digits)
    if not abs(number) < _MOST:
        raise ValueError("a number is too large")
    return int(digits) if digits.lstrip("-").isdecimal() else number


_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=_number)
