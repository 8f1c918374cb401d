"""How a stub has warm.py, which has imported torch, fork its keeper.

The stub connects, and passes its streams; the fork reads all else that a new process would inherit
from the stub in /proc. Then it writes FORKED, and later the exit code. If the connection ends
before FORKED, because warm.py was killed, the stub forks its keeper itself: a rank has one keeper,
whenever that happens.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # see lines.py
import _socket as socket
import array
import ctypes
import os
import select

from lines import suppress  # type: ignore[import-not-found]  # of run/

FORKED = b"f"
_SECONDS = 60.0  # for a fork of the keeper, including unfinished imports
_PRCTL = ctypes.CDLL(None).prctl
_PDEATHSIG = 1  # PR_SET_ of linux/prctl.h


def have_forked(path: str) -> int:
    """Have the keeper forked; return the socket to it, or -1 without a fork.

    Until then, this process ends like any other: at a stop, and with torchrun.
    """
    _PRCTL(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    warm, said = socket.socket(socket.AF_UNIX), b""
    with suppress(OSError):  # it has ended; the launcher logs that
        warm.connect(path)
        streams = array.array("i", [0, 1, 2])
        warm.sendmsg([b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        if not select.select([warm], [], [], _SECONDS)[0]:
            os.kill(warm.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED), signal.SIGKILL)
        said = warm.recv(1)
    _PRCTL(_PDEATHSIG, 0, 0, 0, 0)
    if said == FORKED:
        return warm.detach()
    warm.close()
    return -1
