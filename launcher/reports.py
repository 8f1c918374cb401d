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
import socket
import time
from collections.abc import Mapping
from typing import Any, Callable

from launcher.errors import log
from launcher.failure import RankFailure

_LINE_LIMIT = 1 << 20  # bytes; a rank sends less than 10,000

# Called for each rank that fails, with how often torchrun may still restart it.
OnFailure = Callable[[RankFailure, int], None]


class Reports:
    """The listening end: calls on_failure from the selector's callbacks, keeps the rest.

    Attributes: `reported`, the failed ranks that torchrun named at its end; `torchrun_error`,
    what it raised for a reason of its own ("" if nothing).
    """

    def __init__(
        self, run_dir: str, selector: selectors.BaseSelector, on_failure: OnFailure
    ) -> None:
        self.reported: list[RankFailure] = []
        self.torchrun_error = ""
        self._started = time.monotonic()
        self._selector = selector
        self._on_failure = on_failure
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(os.path.join(run_dir, "socket"))
        self._listener.listen(128)
        self._peers: set[_Peer] = set()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close every socket."""
        self._listener.close()
        for peer in self._peers:
            peer.connection.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers.add(peer)
        act = functools.partial(self._receive, peer)
        self._selector.register(connection, selectors.EVENT_READ, act)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except OSError:
            data = b""
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            try:
                self._take_in(peer, json.loads(line))
            except (KeyError, TypeError, ValueError):
                log(f"ignoring a message that makes no sense: {line[:200]!r}")
        if not data or len(peer.rest) > _LINE_LIMIT:
            self._selector.unregister(peer.connection)
            self._peers.remove(peer)
            peer.connection.close()
            self._lost(peer)

    def _take_in(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        if "pid" in message:
            peer.rank, peer.local_rank = int(message["rank"]), int(message["local_rank"])
            peer.pid = int(message["pid"])
            peer.restarts_left = int(message["restarts_left"])
        elif "end" in message:
            peer.said_why = True
            self._note(peer, **message["end"])
        elif "failures" in message:
            self.reported = [RankFailure(**failure) for failure in message["failures"]]
        elif "torchrun" in message:
            self.torchrun_error = str(message["torchrun"])

    def _lost(self, peer: _Peer) -> None:
        """A connection is gone: if a rank died without a word, say so in its place."""
        if peer.pid and not peer.said_why:
            exit_code = exit_code_of(peer.pid)
            if exit_code:
                self._note(peer, exit_code=exit_code)

    def _note(self, peer: _Peer, **how: Any) -> None:
        now = time.monotonic() - self._started
        failure = RankFailure(peer.rank, peer.local_rank, time=now, **how)
        self._on_failure(failure, peer.restarts_left)


class _Peer:
    """One connection: a rank of this host, or torchrun."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rest = b""  # of a line that has not arrived whole
        self.pid = 0  # 0: not a rank, or it has not said who it is
        self.rank = self.local_rank = -1
        self.restarts_left = 0
        self.said_why = False


def exit_code_of(pid: int) -> int:
    """Return the exit code of a process that is ending, negative for a signal.

    0 means that it ended well, has not ended, or is gone already: torchrun will tell.
    Field 52 of /proc/PID/stat holds it in the form of wait(2) as soon as it is decided
    (proc(5)); torchrun reaps its ranks within 0.1 s.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[49]))
    except (OSError, IndexError, ValueError):
        return 0
