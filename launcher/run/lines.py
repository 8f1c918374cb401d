"""Lines of JSON on a socket that never blocks: how a keeper talks.

Imported by keeper.py, in the keeper's process: it needs nothing of ours.
"""

from __future__ import annotations

import json
import socket

TYPE_CHECKING = False  # typing takes 2 ms
if TYPE_CHECKING:
    from typing import Any

_READ = 1 << 16  # bytes at a time
_LONGEST_LINE = 1 << 20  # of what the script's process says
_QUEUE = 1 << 22  # bytes that may wait for the launcher: more of what a script says is dropped


class Link:
    """Lines of JSON on a socket that does not block; what the other end does not read is queued."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_gone = False
        self.queue, self._rest = bytearray(), b""

    def send(self, message: dict[str, Any], *, is_droppable: bool = False) -> None:
        """Send a message, or queue it; one that is droppable only as far as there is room."""
        if self.is_gone or (is_droppable and len(self.queue) > _QUEUE):
            return
        self.queue += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the other end takes now. A write that fails is its end, too."""
        try:
            while self.queue:
                del self.queue[: self.socket.send(self.queue)]
        except BlockingIOError:
            pass
        except OSError:
            self.is_gone = True
            self.queue.clear()

    def read(self) -> tuple[list[bytes], int]:
        """Return the lines that have come, and a descriptor that came with them, or -1."""
        lines: list[bytes] = []
        passed = -1
        try:
            for _ in range(64):  # whoever floods it is not to keep us
                data, descriptors, _, _ = socket.recv_fds(self.socket, _READ, 1)
                passed = descriptors[0] if descriptors else passed
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
