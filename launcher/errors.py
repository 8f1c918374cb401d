"""The one exception that a person may see, and how to quote and say things."""

from __future__ import annotations

import sys

# The exit codes that are the launcher's own; every other one is the script's (README.md).
EXIT_USAGE = 2
EXIT_HOST_LOST = 69
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127


class LaunchError(Exception):
    """A mistake that a person can mend: what was seen, what was expected, how to mend it.

    It is shown as one line, without a traceback, and becomes the process's exit code.
    """

    def __init__(self, message: str, *, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code


def printable(text: str, keep: str = "") -> str:
    """Return a text in which control characters, newlines too, are shown as Python writes them.

    What ranks and other hosts send ends up on terminals and in the failure file, where an escape
    sequence or a newline could forge a line. `keep` holds the characters that may stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def short(value: object, limit: int = 200) -> str:
    """Return a value as Python writes it, cut to limit characters, to be quoted in a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def log(message: str) -> None:
    """Write one line to stderr. A closed or full stderr must not cost the job."""
    try:
        # One write, so that ranks that share the file cannot come between.
        sys.stderr.write(f"launcher: {printable(message)}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # none at all, full, closed
        pass
