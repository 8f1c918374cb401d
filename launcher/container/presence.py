"""A launcher reports to the init above it (init.py) that it runs, and how it ends.

It connects to the Unix socket that LAUNCHER_INIT names as soon as it handles stops, and stays
connected until it ends. Before that it sends its exit code and whether it was stopped: `143
stopped`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import socket
import struct
from collections.abc import Collection, Mapping

from launcher.host.processes import status
from launcher.job.options import INIT
from launcher.result.causes import Result
from launcher.text.log import log

_INIT_SECONDS = 2  # that an init has to take a connection, or what is sent on it
_BACKLOG = 128  # pending connections


class InitClient:
    """A launcher's end: connected to the init from the start of the `with` block to its end."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        if environ.get(INIT):
            # The variable may have outlived its init: then nobody listens.
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX)
                # An init that stands still must not hold up a launcher (socket(7)).
                limit = struct.pack("ll", _INIT_SECONDS, 0)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                self._connect(self._socket, "\0" + environ[INIT])

    def _connect(self, connection: socket.socket, name: str) -> None:
        try:
            connection.connect(name)
        except BlockingIOError:
            log(
                f"`sm-launch init` has not answered for {_INIT_SECONDS} s: it will not "
                "forward stops to this launcher, nor learn how the job ends."
            )

    def __enter__(self) -> InitClient:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket:
            self._socket.close()

    def report(self, result: Result) -> None:
        """Report how this launcher is about to end."""
        if self._socket:
            message = f"{result.exit_code} stopped" if result.stop_signal else str(result.exit_code)
            with contextlib.suppress(OSError):
                self._socket.sendall(message.encode())


class LauncherRegistry:
    """The init's end: the launchers that run below its command.

    Attributes: `name`, of the socket, for LAUNCHER_INIT; `reported`, how the last launcher that
    has reported ends, None once another has connected since.
    """

    def __init__(self, selector: selectors.BaseSelector, command: str) -> None:
        self.reported: Result | None = None
        self._command = command
        self._pids: dict[socket.socket, int] = {}
        self._refused: set[int] = set()  # uids
        self._selector = selector
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # the kernel finds a free abstract name: unix(7), autobind
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self.name = self._listener.getsockname()[1:].decode()

    def __enter__(self) -> LauncherRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def pids(self) -> list[int]:
        """The pids of the launchers that run."""
        return list(self._pids.values())

    def fileno(self) -> int:
        """Return the descriptor that a selector waits for before `accept`."""
        return self._listener.fileno()

    def accept(self, command: int) -> list[int]:
        """Accept what has connected by now; return the pids of the launchers among them.

        `command` is the command's pid, 0 if it has ended.
        """
        pids = []
        with contextlib.suppress(OSError):  # no more have come, or no descriptor is left for one
            for _ in range(_BACKLOG + 1):  # more than that have to wait until something else is due
                connection, _ = self._listener.accept()
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid, uid, _gid = struct.unpack("i2I", credentials)  # unix(7), struct ucred
                if is_trusted(pid, uid, command, self.pids):
                    self._add(connection, pid)
                    pids.append(pid)
                else:
                    connection.close()
                    self._log_refusal(pid, uid)
        return pids

    def _add(self, connection: socket.socket, pid: int) -> None:
        connection.setblocking(False)
        self._pids[connection] = pid
        self.reported = None  # by an earlier one
        act = functools.partial(self._read, connection)
        self._selector.register(connection, selectors.EVENT_READ, act)

    def _log_refusal(self, pid: int, uid: int) -> None:
        if uid not in self._refused:
            self._refused.add(uid)
            log(
                f"refused process {pid} of uid {uid}, which is not a launcher of this job; "
                f"expected root, uid {os.geteuid()}, or the user of {self._command}."
            )

    def _read(self, connection: socket.socket) -> None:
        message = b""
        with contextlib.suppress(OSError):
            message = connection.recv(64)
        if message:
            self.reported = reported_result(message) or self.reported
            return
        self._selector.unregister(connection)
        connection.close()
        del self._pids[connection]


def reported_result(message: bytes) -> Result | None:
    """Return the result that a launcher has reported; None if the message is invalid."""
    match = re.fullmatch(rb"(\d{1,3})( stopped)?", message)
    if match is None:
        return None
    code = int(match[1])
    return Result(code, stop_signal=max(0, code - 128) if match[2] else 0)


def is_trusted(pid: int, uid: int, command: int, launchers: Collection[int]) -> bool:
    """Tell whether the init of a command takes another process for a launcher.

    An abstract socket has no permissions of its own: any user of the same network can connect. The
    init's own user is trusted, root, and the command's user, which gosu and the like have changed.
    So is what runs below the command as another user (su, sudo), but not below a launcher: that is
    a rank, or what it started.
    Arguments: the process's pid and uid; the pids of the command (0: has ended) and of launchers.
    """
    if pid == 0:
        return False  # in another container, on the same network
    if uid in (0, os.geteuid()):
        return True
    # psutil takes five times as long, 1.2 ms, and a thousand connections may come in a second.
    try:
        if uid == int(status(command)[b"Uid"].split()[1]):  # the effective one
            return True
        while pid > 1:
            pid = int(status(pid)[b"PPid"])
            if pid in launchers:
                return False
            if pid == command:
                return True
    except OSError:
        pass  # one of them has ended
    return False
