"""A launcher reports to the init above it (init.py) that it runs, and how it ends.

As soon as it handles stops, it connects to the Unix socket that LAUNCHER_INIT names, and stays
connected until it ends. Then it sends its exit code and whether it was stopped: `143 stopped`. If
a connection ends without a message, its launcher was killed.
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
_INIT_SECONDS = 2  # for an init to accept a connection, or to read from it
_BACKLOG = 128  # pending connections


@contextlib.contextmanager
def registered(environ: Mapping[str, str]) -> Iterator[Callable[[Result], None]]:
    """Connect to the init, if there is one; yield a function that reports its result."""
    if not environ.get(INIT):
        yield lambda result: None
        return
    with socket.socket(socket.AF_UNIX) as connection:
        # A suspended init must not hold up a launcher (socket(7)).
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
            pass  # the init of this variable has ended

        def report(result: Result) -> None:
            message = f"{result.exit_code} stopped" if result.stop_signal else str(result.exit_code)
            with contextlib.suppress(OSError):
                connection.sendall(message.encode())

        yield report


class LauncherRegistry:
    """The init's end of the sockets: the launchers that run below it.

    Attributes: `name`, the socket's, for LAUNCHER_INIT; `result`, that of the last launcher to end,
    None if none has ended.
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
        """The pids of the running launchers."""
        return list(self._pids.values())

    def fileno(self) -> int:
        """Return the descriptor that a selector waits for before `accept`."""
        return self._listener.fileno()

    def accept(self) -> list[int]:
        """Accept pending connections; return the pids of the launchers among them."""
        pids = []
        with contextlib.suppress(OSError):  # none is pending, or no descriptor is free
            for _ in range(_BACKLOG + 1):  # leave the others for the next turn of the loop
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
    """Return the result in a launcher's message; None if it is not a launcher's message."""
    match = re.fullmatch(rb"(\d{1,3})( stopped)?", message)
    if match is None:
        return None if message else KILLED
    code = int(match[1])
    return Result(code, stop_signal=max(0, code - 128) if match[2] else 0)


def is_trusted(pid: int, uid: int) -> bool:
    """Tell whether this process, an init, takes a process for a launcher.

    An abstract socket has no permissions: any user of the same network namespace can connect. Root,
    the init's own user and all processes below the init are trusted: gosu, su and sudo run the
    command, or some of it, as another user. (pid 0: a process in another container.)
    """
    if uid in (0, os.geteuid()):
        return pid != 0
    # psutil takes five times as long, 1.2 ms, and a thousand connections may come in a second.
    with contextlib.suppress(OSError):  # one of them has ended
        while pid not in (0, os.getpid()):
            pid = int(status(pid)[b"PPid"])
    return pid == os.getpid()
