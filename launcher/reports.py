"""What the ranks of this host and its torchrun tell the launcher, while they run.

Each of them connects to a Unix socket in the job's folder and sends lines, each one a JSON
object. A rank (rank.py) says who it is as soon as it runs, and what ended it if that was an
exception or sys.exit; its connection is closed by the kernel when it dies, which tells the
rest. torchrun (agent.py) connects only to say what its main raised.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol

from launcher.errors import LaunchError, log
from launcher.failure import RankFailure
from launcher.machine import oom_kills

_LINE_LIMIT = 1 << 20  # bytes; a rank sends less than 10,000


class Rank:
    """What is known of one rank's process."""

    def __init__(self) -> None:
        self.rank = self.local_rank = -1
        self.pid = 0  # 0: it has not said who it is, or is torchrun
        self.max_restarts = self.restart = 0
        self.failure: RankFailure | None = None


class Listener(Protocol):
    """Who is told of the ranks' lives, from the selector's callbacks."""

    def on_start(self, rank: Rank) -> None:
        """A rank's process runs."""

    def on_failure(self, rank: Rank, failure: RankFailure) -> None:
        """A rank said why it fails, or died without a word."""

    def on_end(self, rank: Rank) -> None:
        """A rank's process is gone (after on_failure, if it failed)."""


class Reports:
    """The receiving end: tells the listener of the ranks, and keeps what torchrun says.

    Attributes: `alive`, the ranks that run; `torchrun_error`, what torchrun raised for a reason
    of its own ("" if nothing).
    """

    def __init__(self, run_dir: str, selector: selectors.BaseSelector, listener: Listener) -> None:
        self.alive: set[Rank] = set()
        self.torchrun_error = ""
        self._reported: list[RankFailure] = []
        self._gone: dict[int, float] = {}
        self._started = time.monotonic()
        self._oom_kills = oom_kills()
        self._selector = selector
        self._tell = listener
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            self._listener.bind(os.path.join(run_dir, "socket"))
        except OSError as error:
            raise LaunchError(f"cannot make a socket in {run_dir}: {error}; set TMPDIR.") from None
        self._listener.listen(128)
        self._connections: set[socket.socket] = set()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close every socket."""
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def reported(self) -> list[RankFailure]:
        """Return the failures that torchrun named at its end, with times where they are known."""
        return [
            failure._replace(
                time=self._gone.get(failure.rank, failure.time),
                oom=self._oom() if failure.exit_code == -signal.SIGKILL else "",
            )
            for failure in self._reported
        ]

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._connections.add(connection)
        act = functools.partial(self._receive, connection, Rank(), bytearray())
        self._selector.register(connection, selectors.EVENT_READ, act)

    def _receive(self, connection: socket.socket, rank: Rank, rest: bytearray) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        *lines, rest[:] = (rest + data).split(b"\n")
        for line in lines:
            try:
                self._take_in(rank, json.loads(line))
            except (KeyError, TypeError, ValueError):
                log(f"ignoring a message that makes no sense: {bytes(line[:200])!r}")
        if not data or len(rest) > _LINE_LIMIT:
            self._selector.unregister(connection)
            self._connections.remove(connection)
            connection.close()
            if rank.pid:
                self._lost(rank)

    def _take_in(self, rank: Rank, message: Mapping[str, Any]) -> None:
        if "pid" in message:
            vars(rank).update({key: int(value) for key, value in message.items()})
            self.alive.add(rank)
            self._tell.on_start(rank)
        elif "end" in message:
            self._note(rank, said=True, **message["end"])
        elif "failures" in message:
            self._reported = [RankFailure(**failure) for failure in message["failures"]]
        elif "torchrun" in message:
            self.torchrun_error = str(message["torchrun"])

    def _lost(self, rank: Rank) -> None:
        """A rank's connection is gone: if it died without a word, say so in its place."""
        self.alive.discard(rank)
        exit_code = exit_code_of(rank.pid)
        if exit_code is None:
            self._gone[rank.rank] = self._now()  # reaped already: torchrun will tell
        elif exit_code and rank.failure is None:
            self._note(rank, exit_code=exit_code)
        self._tell.on_end(rank)

    def _note(self, rank: Rank, **how: Any) -> None:
        if how["exit_code"] == -signal.SIGKILL:
            how["oom"] = self._oom()
        rank.failure = RankFailure(rank.rank, rank.local_rank, time=self._now(), **how)
        self._tell.on_failure(rank, rank.failure)

    def _oom(self) -> str:
        """Say whose counter of kills for want of memory has moved since the start."""
        for where, count in oom_kills().items():
            if count > self._oom_kills.get(where, count):
                return f"out of memory: {where} counted a kill (oom_kill)"
        return "no kill for want of memory was counted"

    def _now(self) -> float:
        return time.monotonic() - self._started


def exit_code_of(pid: int) -> int | None:
    """Return the exit code of a process that is ending, negative for a signal.

    0: it ends well, or does not end (it closed the connection); None: there is no such process.
    Field 52 of /proc/PID/stat holds it in the form of wait(2) as soon as it is decided
    (proc(5)); torchrun reaps its ranks within 0.1 s.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[49]))
    except (OSError, IndexError, ValueError):
        return None
