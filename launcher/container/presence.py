"""A launcher reports to the init above it (init.py) that it runs, and how it ends.

As soon as it handles stops, it connects to the init's Unix socket and sends the init's token, which
are both in LAUNCHER_INIT. It stays connected until it ends. Then it sends its exit code and the
signal of a stop: `143 15`. If a connection ends without that, its launcher was killed.

An abstract socket has no permissions: any process of the same network namespace can connect. The
token proves that a process has the environment of the init's command, as whatever user it runs
(gosu, su). Ranks do not get it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
from collections.abc import Mapping
from typing import Callable, Optional

from launcher.job.options import INIT
from launcher.result.causes import Result
from launcher.text.protocol import LineSocket, Lobby

Report = Callable[[Optional[Result]], None]
# A launcher whose rank was killed reports the same code, but no text.
KILLED = Result(128 + signal.SIGKILL, "its launcher was killed")
_NO_JOB, _RESULT = b"none", re.compile(rb"(\d{1,3}) (\d{1,2})")


def register(environ: Mapping[str, str]) -> Report:
    """Connect to the init, if there is one; return a function that reports the launcher's result.

    None is the result of what was no launcher of a job: a dry run.
    """
    name, _, token = environ.get(INIT, "").partition(":")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)  # an init that is suspended holds up no launcher
    with contextlib.suppress(OSError):  # the init of this variable has ended
        if name:
            connection.connect("\0" + name)
            connection.send(token.encode() + b"\n")

    def report(result: Result | None) -> None:
        message = b"%d %d" % (result.exit_code, result.stop_signal) if result else _NO_JOB
        with contextlib.suppress(OSError):  # there is no init
            connection.send(message + b"\n")

    return report


class _Launcher(LineSocket):
    limit = 64  # bytes
    pid = 0  # until it has sent the token


class LauncherRegistry(Lobby[_Launcher]):
    """The init's end of the sockets; calls joined(pid) for each launcher that runs below it.

    Attributes: `address`, the value of LAUNCHER_INIT; `result`, that of the last launcher to end,
    None if none has ended.
    """

    def __init__(self, selector: selectors.BaseSelector, joined: Callable[[int], None]) -> None:
        self.result: Result | None = None
        self._joined, self._token = joined, os.urandom(16).hex()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("")  # the kernel finds a free abstract name: unix(7), autobind
        listener.listen()
        self.address = f"{listener.getsockname()[1:].decode()}:{self._token}"
        super().__init__(selector, _Launcher, self._take, lambda this, _: self._take(this, b""))
        self.listen(listener)

    @property
    def pids(self) -> list[int]:
        """The pids of the running launchers."""
        return [each.pid for each in self.connections if each.pid]

    def _take(self, connection: _Launcher, line: bytes) -> None:
        """Handle a line; the last one, of a connection that has ended, is empty."""
        if connection.pid:
            if found := _RESULT.fullmatch(line):
                self.result = Result(int(found[1]), stop_signal=int(found[2]))
            elif line != _NO_JOB:
                self.result = KILLED
        elif line == self._token.encode():
            # The first number of struct ucred (unix(7)) is the pid, 0 for another container's.
            pid = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED)
            if pid:
                connection.pid, connection.is_stranger = pid, False
                self._joined(pid)
                return
        connection.close()
