"""Ports for jobs of tests, in however many processes those run."""

from __future__ import annotations

import errno
import random
import socket
from collections import deque

_marks: deque[socket.socket] = deque(maxlen=100)  # those of tests that have ended are let go


def free_port() -> int:
    """Return a port that is free, and given neither to other tests nor by the kernel to anybody.

    An abstract socket marks it, which is gone when this process is (unix(7)): until a launcher
    listens there, the port looks free to the tests of other processes.
    """
    while True:
        # Not the ports of the launcher, nor those that `sm-launch local` takes, nor those that all
        # processes of these tests would try first, whose `random` pytest-randomly has seeded alike.
        port = random.SystemRandom().randrange(10000, 20000)
        mark = socket.socket(socket.AF_UNIX)
        try:
            with socket.socket() as probe:
                probe.bind(("", port))
                mark.bind(f"\0a port of the launcher's tests: {port}")
        except OSError as error:
            mark.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            _marks.append(mark)
            return port


def ports() -> dict[str, str]:
    """Return variables with free ports for a job of several hosts."""
    return {"LAUNCHER_RDZV_PORT": str(free_port()), "LAUNCHER_PEER_PORT": str(free_port())}
