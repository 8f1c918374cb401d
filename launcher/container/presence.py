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
import socket
from collections.abc import Mapping
from typing import Callable, Optional

from launcher.job.options import INIT
from launcher.result.causes import Result

Report = Callable[[Optional[Result]], None]
NO_JOB = b"none"  # in place of a result


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
        message = b"%d %d" % (result.exit_code, result.stop_signal) if result else NO_JOB
        with contextlib.suppress(OSError):  # there is no init
            connection.send(message + b"\n")

    return report
