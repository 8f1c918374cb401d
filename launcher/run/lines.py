"""Lines on a socket that never blocks: the keeper's protocol; and other tools of a keeper.

Imported by keeper.py, in the keeper's process: it needs no package of ours. Each rank waits for
these imports, and keeps them in memory: C modules, instead of the standard library's wrappers, save
half of a keeper's CPU time.
"""

from __future__ import annotations

import _json
import _socket
import ctypes
import sys

TYPE_CHECKING = False  # typing takes 2 ms
if TYPE_CHECKING:
    from typing import Any

prctl = ctypes.CDLL(None).prctl
PDEATHSIG = 1  # PR_SET_ of linux/prctl.h
_READ = 1 << 16  # bytes at a time
_LONGEST_LINE = 1 << 20  # of a message from the script's process
_DESCRIPTOR = _socket.CMSG_LEN(4)  # bytes of an ancillary message with one descriptor
_QUEUE = 1 << 22  # bytes that may wait for the launcher: further messages of a script are dropped


class _Values:
    """The types of decoded values, as in json.JSONDecoder."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float = parse_constant = float
    parse_int = int


_scan = _json.make_scanner(_Values)  # type: ignore[arg-type]
_encode = _json.make_encoder(
    None, str, _json.encode_basestring_ascii, None, ": ", ", ", False, False, True
)


class suppress:
    """Suppress errors, as contextlib.suppress does."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self._errors)


class Lines:
    """Lines on a socket that does not block; what the other end does not read is queued."""

    def __init__(self, connection: _socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.is_gone = False
        self.queue, self._rest = bytearray(), b""

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self.is_gone = True
        self._socket.close()

    def send(self, message: dict[str, Any], *, is_droppable: bool = False) -> None:
        """Send a message, as JSON."""
        self.pass_on("".join(_encode(message, 0)).encode(), is_droppable=is_droppable)

    def pass_on(self, line: bytes, *, is_droppable: bool = False) -> None:
        """Send a line, or queue it; drop a droppable one if there is no room."""
        if not (self.is_gone or (is_droppable and len(self.queue) > _QUEUE)):
            self.queue += line + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send what the other end takes now. What that has sent before its end is still read."""
        try:
            while self.queue:
                del self.queue[: self._socket.send(self.queue)]
        except BlockingIOError:
            pass
        except OSError:
            self.queue.clear()

    def read(self) -> tuple[list[bytes], int]:
        """Flush; return the received lines, and a descriptor that came with them, or -1."""
        self.flush()
        lines: list[bytes] = []
        passed = -1
        try:
            for _ in range(0 if self.is_gone else 64):  # a flood must not keep us here
                data, ancillary, _, _ = self._socket.recvmsg(_READ, _DESCRIPTOR)
                for _, _, descriptor in ancillary:
                    passed = int.from_bytes(descriptor, sys.byteorder)
                *more, self._rest = (self._rest + data).split(b"\n")
                lines += more
                if not data or len(self._rest) > _LONGEST_LINE:
                    self.is_gone = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.is_gone = True
        return lines, passed


def decoded(line: bytes) -> Any:
    """Return the value of a line of the launcher's."""
    return _scan(line.decode(), 0)[0]
