"""Waits for the ends of ranks' processes that have no connection any more."""

from __future__ import annotations

import functools
import os
import selectors
import sys
from typing import Callable

from launcher.processes import exit_state

# Seconds between two looks at a process that cannot be waited for: at first, and after a while.
_SOON, _MOST = 0.01, 1.0


class Watch:
    """Calls gone(pid, exit_code) for each process once it has ended (exit_code as in `exit_state`).

    Nothing polls if the kernel and the sandbox have pidfd_open(2); else `look` is due.
    """

    def __init__(
        self, selector: selectors.BaseSelector, gone: Callable[[int, int | None], None]
    ) -> None:
        self._selector = selector
        self._gone = gone
        self._waiting: set[int] = set()  # pidfds
        self._polled: dict[int, float] = {}  # pid: seconds until the next look

    def add(self, pid: int) -> None:
        """Wait for the end of a process; it may have ended."""
        if self._told(pid):
            return
        try:
            if sys.platform != "linux":
                raise OSError
            pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # an old kernel, or a sandbox that does not know it
            self._polled[pid] = _SOON
        else:
            self._waiting.add(pidfd)
            act = functools.partial(self._ended, pidfd, pid)
            self._selector.register(pidfd, selectors.EVENT_READ, act)

    def timeout(self) -> float | None:
        """Return in how many seconds `look` is due; None: never."""
        return min(self._polled.values(), default=None)

    def look(self) -> None:
        """See which of the processes that cannot be waited for have ended; less and less often."""
        for pid, seconds in list(self._polled.items()):
            self._polled[pid] = min(2 * seconds, _MOST)
            if self._told(pid):
                del self._polled[pid]

    def close(self) -> None:
        """Stop waiting."""
        while self._waiting:
            os.close(self._waiting.pop())

    def _ended(self, pidfd: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        self._waiting.remove(pidfd)
        os.close(pidfd)
        self._gone(pid, exit_state(pid)[1])

    def _told(self, pid: int) -> bool:
        ended, exit_code = exit_state(pid)
        if ended or exit_code:
            self._gone(pid, exit_code)
            return True
        return False  # it is ending well, or goes on without its connection
