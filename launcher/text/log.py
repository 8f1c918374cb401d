"""What the launcher writes: its log to stderr; to stdout, text that a user has requested.

stderr may have no reader: a stuck `tee`, a log driver that lags. A thread writes the lines, so that
a stop, a failure and the end never wait for a reader.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator

from launcher.text.background import Writer, write_all
from launcher.text.words import printable

_WAITING_LINES = 1000  # at most, that wait for a reader

_lost = 0  # lines that were dropped, because nothing read the log
_collected: list[str] | None = None


def log(message: str) -> None:
    """Log one line. A closed, full or unread stderr must not cost the job."""
    global _lost
    if _collected is not None:
        _collected.append(printable(message))
    elif not relay(_encoded(message)):
        _lost += 1


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Collect all lines that any thread logs meanwhile in a list, and do not write them."""
    global _collected
    _collected = []
    try:
        yield _collected
    finally:
        _collected = None


def relay(lines: bytes) -> bool:
    """Write lines to stderr as they are; return False if too many wait for a reader."""
    if _WRITER.waiting >= _WAITING_LINES:
        return False
    _WRITER.add(lines)
    return True


def show(text: str) -> None:
    """Write a text and a newline to stdout, as much as its reader takes (`| head`).

    In bytes: arguments need not be text in this terminal's encoding.
    """
    _WRITER.flush()
    write_all(1, os.fsencode(text + "\n"))


def _encoded(message: str) -> bytes:
    return f"launcher: {printable(message)}\n".encode("utf-8", "backslashreplace")


def _write(line: bytes) -> None:
    """Write a line in one piece, since ranks write there, too; then the number of lost lines."""
    global _lost
    # Not through sys.stderr: Python could not exit while a thread waits and holds its lock.
    write_all(2, line)
    if _lost and _WRITER.waiting <= 1:  # this line
        lost, _lost = _lost, 0
        why = "were not written, because it was not read in time"
        write_all(2, _encoded(f"{lost} lines of this log {why}."))


_WRITER = Writer(_write)
atexit.register(_WRITER.flush)  # a reader may catch up


def traceback_of(error: BaseException) -> list[str]:
    """Return the lines of an exception's traceback."""
    import traceback  # only an error of the launcher itself needs it

    texts = traceback.format_exception(type(error), error, error.__traceback__)
    return "".join(texts).splitlines()
