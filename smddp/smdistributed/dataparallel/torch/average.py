"""The average that all_reduce makes of a sum: gloo knows no other."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist


def divide(tensor: Any) -> None:
    """Divide the ranks' sum by their number, in place."""
    with torch.no_grad():
        tensor.div_(dist.get_world_size())


class Average:
    """The handle of an average: of its sum, and then of the division."""

    def __init__(self, work: Any, tensor: Any) -> None:
        self._work, self._tensor = work, tensor
        self._lock, self._divided = threading.Lock(), False

    def wait(self, *timeout: Any) -> bool:
        """Wait until tensor holds the average; raises what the sum's own handle raises."""
        self._work.wait(*timeout)
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Tell whether the tensor holds the average."""
        completed = bool(self._work.is_completed())
        if completed:  # or failed: then wait() raises, and nobody can use the tensor
            self._finish()
        return completed

    def get_future(self) -> Any:
        """Return a future of a list with the tensor."""

        def finish(future: Any) -> list[Any]:
            future.value()  # raises what the sum has raised
            self._finish()
            return [self._tensor]

        return self._work.get_future().then(finish)

    def _finish(self) -> None:
        """Divide once, whichever way the sum's end became known, in whichever thread."""
        with self._lock:
            if not self._divided:
                self._divided = True
                divide(self._tensor)
