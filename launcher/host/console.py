"""The launcher's end of the process that copies ranks' files to the console (run/copier.py)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.host.child import start_connected

_SYNC_SECONDS = 0.5  # for a line of ours to come behind what ranks have written before it
_COPY_SECONDS = 0.5  # at the end; then it writes the ends of what is left
_END_SECONDS = 5.0  # until it is killed; if it is not held up, it has ended after 0.75 s
_KILL_SECONDS = 0.1  # that it has to end then
_POLL_SECONDS = 0.005


class Console:
    """The process, in a session of its own: what is sent to ours does not reach it.

    It ends with this process. Raises OSError, or SubprocessError, if it cannot be started.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        null = subprocess.DEVNULL
        self._connection, self.pid = start_connected(argv, environ, stdin=null)
        self._connection.setblocking(False)
        self._sends, self._reads = threading.Lock(), threading.Lock()
        self._requested = self._replied = 0
        self._is_open = True
        self._rest = b""

    def follow(self, files: Sequence[tuple[int, str, int]]) -> None:
        """Have these copied: each a rank, its file and where that begins; no others come anew."""
        self._send({"files": files})

    def sync(self) -> None:
        """Wait until all is copied that ranks have written, but not for long, nor twice.

        For the thread that writes our own lines.
        """
        with self._reads:
            self._receive(0)
            if self._requested == self._replied:
                self._requested += 1
                self._send({"sync": self._requested})
                deadline = time.monotonic() + _SYNC_SECONDS
                while self._requested != self._replied and self._receive(
                    deadline - time.monotonic()
                ):
                    pass

    def end(self) -> bool:
        """Have it copy the rest and end, or kill it; return whether it has copied all it should."""
        with self._reads:
            self._send({"end": _COPY_SECONDS})
            deadline = time.monotonic() + _END_SECONDS
            while self._receive(deadline - time.monotonic()):
                pass
            status = self._reaped(deadline)
            if status is None:
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signal.SIGKILL)
                self._reaped(time.monotonic() + _KILL_SECONDS)
        return status == 0

    def _reaped(self, deadline: float) -> int | None:
        """Reap it; return its status, None if it has not ended by then."""
        with contextlib.suppress(ChildProcessError):  # it has been, and that was said
            while True:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return status
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_SECONDS)
        return 0

    def close(self) -> None:
        """Close the connection, with which it ends."""
        with self._reads, self._sends:
            self._connection.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sends:
            if self._is_open:
                try:
                    self._connection.sendall(json.dumps(message).encode() + b"\n")
                except OSError:  # it was suspended, and the kernel holds 200 KB; or it has ended
                    self._is_open = False

    def _receive(self, seconds: float) -> bool:
        """Wait for a reply, so long; return False if there is none, or it is gone."""
        if self._connection.fileno() < 0:
            return False
        poll = select.poll()  # not select(): the descriptor's number may be high
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(max(0.0, seconds) * 1000):
            return False
        try:
            data = self._connection.recv(4096)
        except OSError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._replied = json.loads(line)["synced"]
        return bool(data)
