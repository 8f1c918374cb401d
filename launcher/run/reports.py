"""What the ranks of this host and its torchrun tell the launcher, while they run.

Each of them connects to a Unix socket in the job's folder and sends lines, each one a JSON
object. A rank (rank.py) says who it is as soon as it runs, and what ended it if that was an
exception or sys.exit. A rank is gone when its process is; its connection may end earlier, when the
rank replaces itself (os.execv) or closes all descriptors. torchrun (agent.py) says what its main
raised. Before it ends ranks, or starts them again, it asks and waits for the answer.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from launcher.errors import LaunchError, log
from launcher.job.machine import oom_kills
from launcher.processes import ending
from launcher.result.failure import RankFailure

_LINE_LIMIT = 1 << 20  # bytes; a rank sends less (describe.py)
# Why torchrun ends ranks: it was told to stop, one has failed, they are restarted, it cannot go on.
STOP, FAILURE, RESTART, ERROR = CLOSINGS = ("stop", "failure", "restart", "error")


class Rank:
    """What is known of one rank's process.

    `failure` is what it failed with, if it did; `exit_code` how its process ended (negative for a
    signal), or is about to, None until that is known; `at_stop` what it does at a stop
    (processes.response), "" if none came while it ran.
    """

    def __init__(self) -> None:
        self.rank = self.local_rank = -1
        self.pid = 0  # 0: it has not said who it is, or is torchrun
        self.max_restarts = self.restart = 0
        self.at_stop = ""
        self.failure: RankFailure | None = None
        self.exit_code: int | None = None


class Listener(Protocol):
    """Who is told of the ranks' lives, from the selector's callbacks."""

    def on_start(self, rank: Rank) -> None:
        """A rank's process runs."""

    def on_failure(self, rank: Rank) -> None:
        """A rank said why it fails, or died without a word; again when its exit code is known."""

    def on_end(self, rank: Rank) -> None:
        """A rank's process is gone (after on_failure, if it is known to have failed)."""

    def on_closing(self, why: str) -> None:
        """Torchrun is about to end the ranks, and waits for `answer`."""

    def on_starting(self) -> None:
        """Torchrun has ended the ranks, is about to start them again, and waits for `answer`."""


class Reports:
    """The receiving end: tells the listener of the ranks, and keeps what torchrun says.

    Attributes: `alive`, the ranks that run; `torchrun_error`, what torchrun raised for a reason
    of its own ("" if nothing).
    """

    def __init__(self, run_dir: str, selector: selectors.BaseSelector, listener: Listener) -> None:
        self.alive: set[Rank] = set()
        self.torchrun_error = ""
        self._latest: dict[int, Rank] = {}  # by local rank
        self._reported: list[RankFailure] = []
        self._gone: dict[int, float] = {}
        self._started = time.monotonic()
        self._oom_kills = oom_kills()
        self._selector = selector
        self._tell = listener
        self._asking: socket.socket | None = None
        self._watched: set[int] = set()  # descriptors of ranks without a connection
        self._unwatched: dict[Rank, float] = {}  # looked at every so many seconds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            self._listener.bind(os.path.join(run_dir, "socket"))
        except OSError as error:
            raise LaunchError(f"cannot make a socket in {run_dir}: {error}; set TMPDIR.") from None
        self._listener.listen(128)
        self._is_full = False  # no descriptor is left for another connection
        self._connections: set[socket.socket] = set()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close every socket."""
        self._listener.close()
        for connection in self._connections:
            connection.close()
        for process in self._watched:
            os.close(process)

    def timeout(self) -> float | None:
        """Return in how many seconds `look` is due; None: never, as while all ranks run."""
        return min(self._unwatched.values(), default=None)

    def look(self) -> None:
        """See which of the ranks that cannot be waited for are gone; less and less often."""
        for rank, seconds in list(self._unwatched.items()):
            self._unwatched[rank] = min(2 * seconds, 1)
            if rank not in self.alive or self._lost_if_gone(rank):
                del self._unwatched[rank]

    def answer(self, timeout: float | None = None) -> None:
        """Let torchrun go on, with so many seconds for the ranks to end (None: its own)."""
        if self._asking:
            self._reply(self._asking, {} if timeout is None else {"timeout": timeout})
            self._asking = None

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
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # On the first of 1,000 hosts. They wait in the kernel until one has hung up.
                self._selector.unregister(self._listener)
                self._is_full = True
            return
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
                self._take_in(connection, rank, json.loads(line))
            except (KeyError, TypeError, ValueError):
                log(f"ignoring a message that makes no sense: {bytes(line[:200])!r}")
        if not data or len(rest) > _LINE_LIMIT:
            self._selector.unregister(connection)
            self._connections.remove(connection)
            connection.close()
            if self._is_full:
                self._is_full = False
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            if connection is self._asking:
                self._asking = None
            if rank in self.alive:
                self._hung_up(rank)

    def _take_in(self, connection: socket.socket, rank: Rank, message: Mapping[str, Any]) -> None:
        if "pid" in message:
            rank.rank, rank.local_rank = int(message["rank"]), int(message["local_rank"])
            rank.max_restarts, rank.restart = int(message["max_restarts"]), int(message["restart"])
            rank.pid = int(message["pid"])
            self.alive.add(rank)
            self._latest[rank.local_rank] = rank
            self._tell.on_start(rank)
        elif "end" in message:
            end = dict(message["end"])
            if end.pop("final", True):
                rank.exit_code = end["exit_code"]
            self._note(rank, said=True, **end)
        elif "final" in message:
            if rank.failure and rank.exit_code is None:
                self._exit_code_is(rank, rank.failure.exit_code)
        else:
            self._take_in_from_torchrun(connection, message)

    def _take_in_from_torchrun(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        if "failures" in message:
            self._reported = [RankFailure(**failure) for failure in message["failures"]]
        if "torchrun" in message:
            self.torchrun_error = str(message["torchrun"])
        for local_rank, exit_code in message.get("exit_codes", {}).items():
            ended = self._latest.get(int(local_rank))
            if ended and exit_code is not None:
                if ended in self.alive:
                    self._lost(ended, exit_code)
                self._exit_code_is(ended, exit_code)
        if message.get("closing") in CLOSINGS:
            self._asking = connection
            self._tell.on_closing(message["closing"])
        elif "starting" in message:
            self._asking = connection
            self._tell.on_starting()
        else:
            self._reply(connection, {})

    def _reply(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        try:
            connection.send(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # it was killed while it waited

    def _hung_up(self, rank: Rank) -> None:
        """A rank's connection has ended: see whether its process has, or go on to wait for that."""
        if self._lost_if_gone(rank):
            return
        try:
            if sys.platform != "linux":
                raise OSError
            process = os.pidfd_open(rank.pid)
        except (AttributeError, OSError):  # an old kernel, or a sandbox that does not know it
            self._unwatched[rank] = 0.01
        else:
            self._watched.add(process)
            act = functools.partial(self._process_ended, process, rank)
            self._selector.register(process, selectors.EVENT_READ, act)

    def _process_ended(self, process: int, rank: Rank) -> None:
        self._selector.unregister(process)
        self._watched.remove(process)
        os.close(process)
        if rank in self.alive:
            self._lost(rank, ending(rank.pid)[1])

    def _lost_if_gone(self, rank: Rank) -> bool:
        ended, exit_code = ending(rank.pid)
        if ended or exit_code:
            self._lost(rank, exit_code)
            return True
        return False  # it is ending well, or goes on without its connection

    def _lost(self, rank: Rank, exit_code: int | None) -> None:
        """A rank's process is gone; its exit code is None where torchrun alone knows it."""
        self.alive.discard(rank)
        if exit_code is None:
            self._gone[rank.rank] = self._now()
        else:
            self._exit_code_is(rank, exit_code)
        self._tell.on_end(rank)

    def _exit_code_is(self, rank: Rank, exit_code: int) -> None:
        """Note how a process really ended; if it died without a word, say so in its place."""
        if rank.exit_code == exit_code or (rank.exit_code is not None and exit_code < 0):
            return
        rank.exit_code = exit_code
        if rank.failure is None:
            if exit_code:
                self._note(rank, exit_code=exit_code)
            return
        # Said 1, died of a signal: it was killed, or crashed, on its way out (torch's threads
        # make some do that). What it said is the cause, and the code that it would have had.
        if exit_code >= 0:
            rank.failure = rank.failure._replace(exit_code=exit_code)
        self._tell.on_failure(rank)

    def _note(self, rank: Rank, **how: Any) -> None:
        if how["exit_code"] == -signal.SIGKILL:
            how["oom"] = self._oom()
        rank.failure = RankFailure(rank.rank, rank.local_rank, time=self._now(), **how)
        self._tell.on_failure(rank)

    def _oom(self) -> str:
        """Say whose counter of kills for want of memory has moved since the start."""
        for where, count in oom_kills().items():
            if count > self._oom_kills.get(where, count):
                return f"out of memory: {where} counted a kill (oom_kill)"
        return "no kill for want of memory was counted"

    def _now(self) -> float:
        return time.monotonic() - self._started
