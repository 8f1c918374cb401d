"""Virtual time: what happens in a simulated job happens here, one thing after the other."""

from __future__ import annotations

import heapq
from typing import Any, Callable


class Clock:
    """The time in seconds since the job's start, and what is to happen.

    Things happen in the order of their times; those of the same time in the order in which they
    were asked for. Nothing else orders them, so the same plan gives the same job every time.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        """Have something happen at a time, or at once if that has passed."""
        self._count += 1
        heapq.heappush(self._queue, (max(when, self.now), self._count, act, arguments))

    def after(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Have something happen after a delay."""
        self.at(self.now + seconds, act, *arguments)

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, act, arguments = heapq.heappop(queue)
            act(*arguments)
