"""A launcher reports to the init above it (init.py) that it runs, and how it ends.

It connects to the Unix socket that LAUNCHER_INIT names as soon as it handles stops, and stays
connected until it ends. Before that it sends its exit code and whether it was stopped: `143
stopped`. A connection that ends without a word is that of a launcher that was killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Callable

from launcher.host.processes import status
from launcher.job.options import INIT
from launcher.result.causes import Result
from launcher.text.log import log

KILLED = Result(128 + signal.SIGKILL)
_INIT_SECONDS = 2  # that an init has to take a connection, or what is sent on it
_BACKLOG = 128  # pending connections


@contextlib.contextmanager
def registered(environ: Mapping[str, str]) -> Iterator[Callable[[Result], None]]:
    """Be connected to the init, if there is one; yield what reports how this launcher will end."""
    if not environ.get(INIT):
        yield lambda result: None
        return
    with socket.socket(socket.AF_UNIX) as connection:
        # An init that stands still must not hold up a launcher (socket(7)).
        limit = struct.pack("ll", _INIT_SECONDS, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            connection.connect("\0" + environ[INIT])
        except BlockingIOError:
            log(
                f"`sm-launch init` has not answered for {_INIT_SECONDS} s: it will not "
                "forward stops to this launcher, nor learn how the job ends."
            )
        except OSError:
            pass  # the variable has outlived its init: nobody listens

        def report(result: Result) -> None:
            message = f"{result.exit_code} stopped" if result.stop_signal else str(result.exit_code)
            with contextlib.suppress(OSError):
                connection.sendall(message.encode())

        yield report


class LauncherRegistry:
    """The init's end: the launchers that run below it.

    Attributes: `name`, of the socket, for LAUNCHER_INIT; `result`, how the launcher ended that
    ended last, None if none has.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.result: Result | None = None
        self._pids: dict[socket.socket, int] = {}
        self._messages: dict[socket.socket, bytes] = {}
        self._refused: set[int] = set()  # uids
        self._selector = selector
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # the kernel finds a free abstract name: unix(7), autobind
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self.name = self._listener.getsockname()[1:].decode()

    @property
    def pids(self) -> list[int]:
        """The pids of the launchers that run."""
        return list(self._pids.values())

    def fileno(self) -> int:
        """Return the descriptor that a selector waits for before `accept`."""
        return self._listener.fileno()

    def accept(self) -> list[int]:
        """Accept what has connected by now; return the pids of the launchers among them."""
        pids = []
        with contextlib.suppress(OSError):  # no more have come, or no descriptor is left for one
            for _ in range(_BACKLOG + 1):  # more than that have to wait until something else is due
                connection, _ = self._listener.accept()
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid, uid, _gid = struct.unpack("i2I", credentials)  # unix(7), struct ucred
                if is_trusted(pid, uid):
                    connection.setblocking(False)
                    self._pids[connection] = pid
                    act = functools.partial(self._read, connection)
                    self._selector.register(connection, selectors.EVENT_READ, act)
                    pids.append(pid)
                else:
                    connection.close()
                    self._log_refusal(pid, uid)
        return pids

    def _log_refusal(self, pid: int, uid: int) -> None:
        if uid not in self._refused:
            self._refused.add(uid)
            log(
                f"refused process {pid} of uid {uid}, which is not a launcher of this job; "
                f"expected root, uid {os.geteuid()}, or a process below this one."
            )

    def _read(self, connection: socket.socket) -> None:
        message = b""
        with contextlib.suppress(OSError):
            message = connection.recv(64)
        if message:
            self._messages[connection] = message
            return
        self.result = result_of(self._messages.pop(connection, b"")) or self.result
        self._selector.unregister(connection)
        connection.close()
        del self._pids[connection]


def result_of(message: bytes) -> Result | None:
    """Return how a launcher ended by what it sent; None if that is no launcher's message."""
    match = re.fullmatch(rb"(\d{1,3})( stopped)?", message)
    if match is None:
        return None if message else KILLED
    code = int(match[1])
    return Result(code, stop_signal=max(0, code - 128) if match[2] else 0)


def is_trusted(pid: int, uid: int) -> bool:
    """Tell whether this process, an init, takes a process for a launcher.

    An abstract socket has no permissions of its own: any user of the same network can connect.
    Trusted are root and the init's own user, and whatever runs below the init: gosu, su and sudo
    make the command, or a part of it, another user's. (pid 0: it is in another container.)
    """
    if uid in (0, os.geteuid()):
        return pid != 0
    # psutil takes five times as long, 1.2 ms, and a thousand connections may come in a second.
    with contextlib.suppress(OSError):  # one of them has ended
        while pid not in (0, os.getpid()):
            pid = int(status(pid)[b"PPid"])
    return pid == os.getpid()
