"""Call a function that may hang in a thread of its own, and wait for it only so long."""

from __future__ import annotations

from typing import Callable, TypeVar

from launcher.text import background

T = TypeVar("T")


def within(seconds: float, function: Callable[[], T], otherwise: T) -> T:
    """Return what a function returns within so many seconds, `otherwise` if it takes longer.

    Also if no thread can be started. A thread that hangs ends with this process.
    """
    found: list[T] = []
    try:
        thread = background.start(lambda: found.append(function()))
    except RuntimeError:
        return otherwise
    thread.join(seconds)
    return found[0] if found else otherwise
