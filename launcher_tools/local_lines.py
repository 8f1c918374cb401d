"""Cuts what processes write into lines, and keeps the progress bar behind the last one. Pure."""

from __future__ import annotations

_MOST = 64 * 1024  # bytes that may wait for the end of their line


class Lines:
    """One stream of bytes. What `\\r` overwrites is gone, as on a terminal."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take what was read; return the lines that have ended, without their newlines."""
        *lines, tail = (self._tail + data).split(b"\n")
        lines = [_last(line) for line in lines]
        if b"\r" in tail:
            # A newline may follow at once: then the last \r is a part of the line's end.
            tail = b"\r" + _last(tail) + (b"\r" if tail.endswith(b"\r") else b"")
        while len(tail) > _MOST:
            lines.append(_last(tail[:_MOST]))
            tail = tail[_MOST:]
        self._tail = tail
        return lines

    @property
    def bar(self) -> bytes:
        """The progress bar: what is there of a line that was begun anew with `\\r`."""
        return _last(self._tail) if b"\r" in self._tail else b""

    def end(self) -> list[bytes]:
        """Return the line that has no newline, if there is one."""
        tail, self._tail = _last(self._tail), b""
        return [tail] if tail else []


def _last(line: bytes) -> bytes:
    """Return what a terminal would show of a line; lines may end with `\\r\\n`."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
