"""What the launcher says: its log, lines on stderr; on stdout what somebody asked for."""

from __future__ import annotations

import os
import sys

from launcher.text import printable


def log(message: str) -> None:
    """Write one line to stderr. A closed or full stderr must not cost the job."""
    try:
        # One write, so that the lines of ranks that share the file cannot come between.
        sys.stderr.write(f"launcher: {printable(message)}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # no stderr at all, full, closed
        pass


def show(text: str) -> None:
    """Write a text and a newline to stdout, as far as somebody takes it (`| head`).

    As bytes: arguments need not be text in this terminal's encoding.
    """
    data = os.fsencode(text + "\n")
    try:
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]
    except (AttributeError, OSError, ValueError):  # no stdout at all, full, closed
        pass
