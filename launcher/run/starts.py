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
_READY_SECONDS = 60.0  # for a torchrun to be forked: for imports that have not ended, too


class Request(NamedTuple):
    """A torchrun that is to be forked, and to be there by `deadline`."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    deadline: float
    is_sent: bool = False


class Nursery:
    """Forks torchruns once it is ready; each reports to the launcher by itself.

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
        failed: Callable[[str], None],
    ) -> None:
        self._system, self._failed = system, failed
        self._is_ready = False
        self.request: Request | None = None  # that is under way
        self._process = system.start_helper(argv, environ, mark, folder, self._received)

    @property
    def pid(self) -> int:
        """That of its process."""
        return self._process.pid

    def due(self) -> float:
        """Return when it is late."""
        return self.request.deadline if self.request else math.inf

    def is_late(self) -> None:
        """Give it up."""
        self._fail(
            "the process that forks torchrun and ranks has not forked torchrun within "
            f"{_READY_SECONDS:g} s"
        )

    def fork(self, argv: Sequence[str], environ: Mapping[str, str], folder: str) -> None:
        """Have a torchrun forked, as soon as that can be."""
        deadline = self._system.now() + _READY_SECONDS
        self.request = Request(argv, environ, folder, deadline)
        self._send()

    def forget(self) -> bool:
        """Have no torchrun forked any more; return False if it may be too late for that."""
        if self.request and self.request.is_sent:
            return False
        self.request = None
        return True

    def ended(self) -> None:
        """Its process has ended, and been reaped."""
        self._process.close(kill=False)
        self._fail(_HAS_ENDED)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _send(self) -> None:
        if self.request and self._is_ready:
            request, self.request = self.request, self.request._replace(is_sent=True)
            message = {"kind": "torchrun", "argv": request.argv, "folder": request.folder or "."}
            if not self._process.send({**message, "environment": dict(request.environ)}):
                self._fail(_CANNOT)

    def _received(self, message: Mapping[str, Any] | None) -> None:
        if message is None:
            self._fail(_HAS_ENDED)
        elif "ready" in message:
            self._is_ready = True
            self._send()
        elif "unfit" in message:
            self._fail(printable(str(message["unfit"])))
        elif not message.get("forked"):
            self._fail(_CANNOT)

    def _fail(self, why: str) -> None:
        """Say once why it cannot be used."""
        self._process.close()
        failed, self._failed = self._failed, lambda why: None
        failed(why)


class Starts:
    """Starts this host's torchruns, and knows the process of the one that runs.

    `child` is its pid, 0 while there is none yet. A torchrun that is forked reports itself; if what
    forks it fails, it is known once all is read whether it was forked. `ended` is called with the
    exit code of one that was killed before; `again` has the same torchrun started anew, in a folder
    of its own: one that reports itself later is nobody's.
    """

    def __init__(
        self, system: System, ended: Callable[[int], None], again: Callable[[], None]
    ) -> None:
        self._system, self._ended, self._again = system, ended, again
        self._nursery: Nursery | None = None
        self._waits = False  # for a torchrun that is forked to report itself
        self._has_failed = False  # what forks it
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
        try:
            self._nursery = Nursery(self._system, argv, environ, mark, folder, self._starts_cold)
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
        self.child, self._is_killed, self._has_failed = 0, False, False
        self._reaped.clear()
        self._waits = self._nursery is not None
        if self._nursery:
            self._nursery.fork(argv[1:], environ, folder)
        else:
            self.child = self._system.start(argv, environ, mark, tied=tied, folder=folder)

    def kill_early(self) -> None:
        """Have the torchrun not run that has no process yet, or none that we know."""
        self._is_killed = True
        if self._nursery and self._nursery.forget():
            self._waits = False
            self._ended(-signal.SIGKILL)

    @property
    def has_children(self) -> bool:
        """Whether there are any processes that are to be reaped."""
        return bool(self.child or self._nursery or self._waits)

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

    @property
    def has_more(self) -> bool:
        """Whether it is to be decided, once all is read, whether a torchrun was forked."""
        return self._waits and self._has_failed

    def go_on(self) -> None:
        """All is read: it was not."""
        if self.has_more:
            self._waits = False
            if self._is_killed:
                self._ended(-signal.SIGKILL)
            else:
                self._again()

    def close(self) -> None:
        """End the nursery."""
        if self._nursery:
            self._nursery.close()

    def runs(self, pid: int) -> None:
        """A torchrun has reported its pid: the one that was to be forked, if there is one."""
        if not self._waits:
            return
        self._waits, self.child = False, pid
        if self._nursery:
            self._nursery.request = None
        self._system.add_leader(pid)
        self._system.limit_files(pid)
        if pid in self._reaped:
            self._ended(self._reaped[pid])
        elif self._is_killed:
            self._system.send(pid, signal.SIGKILL)

    def _starts_cold(self, why: str) -> None:
        """Go on without a nursery; a torchrun that it has not forked starts cold."""
        self._system.log(f"{flag('start')} warm falls back to cold: {why}.")
        self._nursery, self._has_failed = None, True
