"""The launcher's end of the process that forks torchrun and its ranks (nursery.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from launcher.host.system import System
from launcher.text.words import printable

_HAS_ENDED = "the process that forks torchrun and ranks has ended"
_CANNOT = "the process that forks torchrun and ranks cannot fork"
_READY_SECONDS = 60.0  # from the wish to start a torchrun, for its imports; cold ones would run too


class Start(NamedTuple):
    """A torchrun that is to be forked; by `deadline` the nursery must be ready for it."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    deadline: float
    is_sent: bool = False


class Nursery:
    """Forks torchruns once it is ready; `forked` is called with the pid of each.

    `failed` is called once, with why not, if it cannot, or can no longer: then all starts are cold.
    Raises OSError, or SubprocessError, if it cannot be started.
    """

    def __init__(
        self,
        system: System,
        argv: Sequence[str],
        environ: Mapping[str, str],
        mark: tuple[str, str],
        folder: str,
        forked: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:
        self._system, self._forked, self._failed = system, forked, failed
        self._is_ready = False
        self.start: Start | None = None  # that is under way
        self._process = system.start_helper(argv, environ, mark, folder, self._hears)

    @property
    def pid(self) -> int:
        """That of its process."""
        return self._process.pid

    def due(self) -> float:
        """Return when it is late."""
        waits = self.start and not self._is_ready
        return self.start.deadline if self.start and waits else math.inf

    def is_late(self) -> None:
        """Give it up."""
        self._fail(f"it has not imported torch within {_READY_SECONDS:g} s")

    def fork(self, argv: Sequence[str], environ: Mapping[str, str], folder: str) -> None:
        """Have a torchrun forked, as soon as that can be."""
        deadline = self._system.now() + _READY_SECONDS
        self.start = Start(argv, environ, folder, deadline)
        self._send()

    def forget(self) -> bool:
        """Have no torchrun forked any more; return False if it may be too late for that."""
        if self.start and self.start.is_sent:
            return False
        self.start = None
        return True

    def ended(self) -> None:
        """Its process has ended, and been reaped."""
        self._process.close(kill=False)
        self._fail(_HAS_ENDED)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _send(self) -> None:
        if self.start and self._is_ready:
            start, self.start = self.start, self.start._replace(is_sent=True)
            message = {"kind": "torchrun", "argv": start.argv, "folder": start.folder or "."}
            if not self._process.send({**message, "environment": dict(start.environ)}):
                self._fail(_CANNOT)

    def _hears(self, message: Mapping[str, Any] | None) -> None:
        if message is None:
            self._fail(_HAS_ENDED)
        elif "ready" in message:
            self._is_ready = True
            self._send()
        elif "unfit" in message:
            self._fail(printable(str(message["unfit"])))
        elif message.get("forked"):
            self.start = None
            self._forked(int(message["forked"]))
        else:
            self._fail(_CANNOT)

    def _fail(self, why: str) -> None:
        """Say once why it cannot be used."""
        self._process.close()
        failed, self._failed = self._failed, lambda why: None
        failed(why)
