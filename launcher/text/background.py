"""Threads beside the loop: what may take long, or hang."""

from __future__ import annotations

import signal
import threading
from typing import Callable, TypeVar

T = TypeVar("T")


def start(function: Callable[[], object]) -> threading.Thread:
    """Call a function in a thread that takes no signals, and does not outlive this process.

    All signals go to the loop's thread: so it finds a stop before what that has ended. Raises
    RuntimeError if this container allows no more threads.
    """
    thread = threading.Thread(target=function, daemon=True)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # which it inherits
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return thread


def within(seconds: float, function: Callable[[], T], otherwise: T) -> T:
    """Return a function's result, or `otherwise` if it takes longer than `seconds`.

    Return `otherwise`, too, if no thread can be started.
    """
    found: list[T] = []
    try:
        start(lambda: found.append(function())).join(seconds)
    except RuntimeError:
        pass
    return found[0] if found else otherwise
