"""How torchrun is started: cold, or forked by a process that has imported torch (nursery.py)."""

from __future__ import annotations

import math
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from launcher.host.system import System
from launcher.text.words import flag, printable

_HAS_ENDED = "the process that forks torchrun and ranks has ended"
_CANNOT = "the process that forks torchrun and ranks cannot fork"
_READY_SECONDS = 60.0  # from the wish to start a torchrun, for its imports; cold ones would run too


class Order(NamedTuple):
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
        self.order: Order | None = None  # that is under way
        self._process = system.start_helper(argv, environ, mark, folder, self._hears)

    @property
    def pid(self) -> int:
        """That of its process."""
        return self._process.pid

    def due(self) -> float:
        """Return when it is late."""
        waits = self.order and not self._is_ready
        return self.order.deadline if self.order and waits else math.inf

    def is_late(self) -> None:
        """Give it up."""
        self._fail(f"it has not imported torch within {_READY_SECONDS:g} s")

    def fork(self, argv: Sequence[str], environ: Mapping[str, str], folder: str) -> None:
        """Have a torchrun forked, as soon as that can be."""
        deadline = self._system.now() + _READY_SECONDS
        self.order = Order(argv, environ, folder, deadline)
        self._send()

    def forget(self) -> bool:
        """Have no torchrun forked any more; return False if it may be too late for that."""
        if self.order and self.order.is_sent:
            return False
        self.order = None
        return True

    def ended(self) -> None:
        """Its process has ended, and been reaped."""
        self._process.close(kill=False)
        self._fail(_HAS_ENDED)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _send(self) -> None:
        if self.order and self._is_ready:
            order, self.order = self.order, self.order._replace(is_sent=True)
            message = {"kind": "torchrun", "argv": order.argv, "folder": order.folder or "."}
            if not self._process.send({**message, "environment": dict(order.environ)}):
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
            self.order = None
            self._forked(int(message["forked"]))
        else:
            self._fail(_CANNOT)

    def _fail(self, why: str) -> None:
        """Say once why it cannot be used."""
        self._process.close()
        failed, self._failed = self._failed, lambda why: None
        failed(why)


class Starts:
    """Starts this host's torchruns, and knows the process of the one that runs.

    `child` is its pid, 0 while there is none yet. `ended` is called with the exit code of one that
    was killed before it had a process; `again` has the same torchrun started anew, in a folder of
    its own: one that was forked all the same is nobody's.
    """

    def __init__(
        self, system: System, ended: Callable[[int], None], again: Callable[[], None]
    ) -> None:
        self._system, self._ended, self._again = system, ended, again
        self._nursery: Nursery | None = None
        self._is_killed = False
        self._reaped: dict[int, int] = {}  # exit codes of what ended before we knew its pid
        self.child = 0

    def begin_warm(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        mark: tuple[str, str],
        folder: str,
    ) -> None:
        """Start a nursery, for its imports to overlap with joining."""
        took = self._forked, self._starts_cold
        try:
            self._nursery = Nursery(self._system, argv, environ, mark, folder, *took)
        except (OSError, subprocess.SubprocessError) as error:
            self._starts_cold(str(error))

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        mark: tuple[str, str],
        *,
        tied: bool,
        folder: str,
    ) -> None:
        """Start a torchrun, or what runs it. Raises LaunchError."""
        self.child, self._is_killed = 0, False
        self._reaped.clear()
        if self._nursery:
            self._nursery.fork(argv[1:], environ, folder)
        else:
            self.child = self._system.start(argv, environ, mark, tied=tied, folder=folder)

    def kill_early(self) -> None:
        """Have the torchrun not run that has no process yet, or none that we know."""
        self._is_killed = True
        if self._nursery and self._nursery.forget():
            self._ended(-signal.SIGKILL)

    @property
    def has_children(self) -> bool:
        """Whether there are any processes that are to be reaped."""
        return bool(self.child or self._nursery)

    def is_nursery(self, pid: int, exit_code: int) -> bool:
        """Take note of a process that was reaped; tell whether it was the nursery."""
        if self._nursery and pid == self._nursery.pid:
            self._nursery.ended()
            return True
        if not self.child:
            self._reaped[pid] = exit_code
        return False

    def due(self) -> float:
        """Return when the nursery is late."""
        return self._nursery.due() if self._nursery else math.inf

    def is_late(self) -> None:
        """Do without the nursery."""
        if self._nursery:
            self._nursery.is_late()

    def close(self) -> None:
        """End the nursery."""
        if self._nursery:
            self._nursery.close()

    def _forked(self, pid: int) -> None:
        self.child = pid
        self._system.add_leader(pid)
        self._system.limit_files(pid)
        if pid in self._reaped:
            self._ended(self._reaped[pid])
        elif self._is_killed:
            self._system.send(pid, signal.SIGKILL)

    def _starts_cold(self, why: str) -> None:
        """Go on without a nursery; a torchrun that it was to fork starts now."""
        self._system.log(f"{flag('start')} warm: starting cold, as {why}.")
        nursery, self._nursery = self._nursery, None
        if nursery and nursery.order and self._is_killed:
            self._ended(-signal.SIGKILL)
        elif nursery and nursery.order:
            self._again()
