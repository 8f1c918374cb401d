"""What the launcher writes: its log to stderr; to stdout, text that a user has requested.

stderr may have no reader: a stuck `tee`, a log driver that lags. A thread writes the lines, so that
a stop, a failure and the end never wait for a reader.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.text.notes import Note
from launcher.text.words import Log, printable, short, shortened
from launcher.text.writer import Writer, write_all

_WAITING_LINES = 1000  # at most, that wait for a reader
_END_SECONDS = 1.0  # at the end, for a reader to catch up
_VALUE_CHARACTERS = 80  # of a value that --launcher-verbose shows


_lost = 0  # lines that were dropped, because nothing read the log
_kept: list[str] | None = None


def log(message: str) -> None:
    """Log one line. A closed, full or unread stderr must not cost the job."""
    if _kept is not None:
        _kept.append(printable(message))
    elif sys.stderr is not None:  # if stderr is closed, 2 may be another file of ours
        _add(_encoded(message))


@contextlib.contextmanager
def kept() -> Iterator[list[str]]:
    """Collect all lines that any thread logs meanwhile in a list, and do not write them."""
    global _kept
    lines: list[str] = []
    _kept = lines
    try:
        yield lines
    finally:
        _kept = None


def relay(lines: bytes) -> bool:
    """Write lines of torchrun's to stderr; return False if too many wait for a reader."""
    if _WRITER.waiting >= _WAITING_LINES:
        return False
    if sys.stderr is not None and lines:
        _add(lines)
    return True


def flush() -> None:
    """Wait until all lines are written, but at most for a second; Python calls this at exit."""
    _WRITER.flush(_END_SECONDS)


def show(text: str) -> None:
    """Write a text and a newline to stdout, as much as its reader takes (`| head`).

    In bytes: arguments need not be text in this terminal's encoding.
    """
    flush()
    data = os.fsencode(text + "\n")
    try:
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]
    except (AttributeError, OSError, ValueError):  # no stdout at all, full, closed
        pass


def _encoded(message: str) -> bytes:
    return f"launcher: {printable(message)}\n".encode("utf-8", "backslashreplace")


def _add(line: bytes) -> None:
    global _lost
    if _WRITER.waiting < _WAITING_LINES:
        _WRITER.add(line)
    else:
        _lost += 1


def _write(line: bytes) -> None:
    """Write a line in one piece, since ranks write there, too; then the number of lost lines."""
    global _lost
    # Not through sys.stderr: Python could not exit while a thread waits and holds its lock.
    write_all(2, line)
    if _lost and _WRITER.waiting <= 1:  # this line
        lost, _lost = _lost, 0
        _write(
            _encoded(f"{lost} lines of this log were not written, because nothing was reading it.")
        )


_WRITER = Writer(_write)
atexit.register(flush)


def traceback_of(error: BaseException) -> list[str]:
    """Return the lines of an exception's traceback."""
    import traceback  # only an error of the launcher itself needs it

    texts = traceback.format_exception(type(error), error, error.__traceback__)
    return "".join(texts).splitlines()


def described(
    machine: str, before: Any, event: Any, after: Any, actions: Any, seconds: float
) -> str:
    """Return what --launcher-verbose logs of a step of a state machine; "" if it changed nothing.

    "3.214 s: run Running to Ending on End(number=1, ...): EndRanks(...)", where
    `seconds` have passed since the launcher's start.
    """
    was, now = type(before.phase).__name__, type(after.phase).__name__
    if not actions and (after == before or (was == now and type(event).__name__ == "Time")):
        return ""  # at most a due time has changed
    to = "" if was == now else f" to {now}"
    done = ", ".join(_written(each) for each in actions if not isinstance(each, (Log, Note)))
    return f"{seconds:.3f} s: {machine} {was}{to} on {_written(event)}" + (done and f": {done}")


def _written(value: Any) -> str:
    """Return an event, an action or one of its values as Python writes it, but cut if it is long.

    Of a mapping, only the keys: the values that hosts compare include the script's arguments, which
    may be secret.
    """
    if hasattr(value, "_fields"):
        fields = zip(value._fields, value)
        named = ", ".join(f"{name}={_written(part)}" for name, part in fields)
        return shortened(f"{type(value).__name__}({named})", _VALUE_CHARACTERS * 4)
    return short(list(value) if isinstance(value, Mapping) else value, _VALUE_CHARACTERS)
