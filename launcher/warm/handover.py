"""How a stub has warm.py, which has imported torch, fork its keeper.

The stub connects, and passes its streams and a pipe for its exit code; the fork reads all else that
a new process would inherit from the stub in /proc. Then it writes FORKED into the pipe. If the pipe
ends without that, because warm.py was killed, the stub forks its keeper itself: so a rank has one
keeper, whenever that happens.
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
    """Have the keeper forked; return the pipe where it says an exit code, or -1 without a fork.

    Until then, this process ends like any other: at a stop, and with torchrun.
    """
    _PRCTL(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    told, tells = os.pipe()
    connection = socket.socket(socket.AF_UNIX)
    with suppress(OSError):  # it has ended; the launcher logs that
        connection.connect(path)
        passed = array.array("i", [0, 1, 2, tells])
        connection.sendmsg([b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    os.close(tells)
    if not select.select([told], [], [], _SECONDS)[0]:
        with suppress(OSError):  # the launcher then logs it
            os.kill(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED), signal.SIGKILL)
    is_forked = os.read(told, 1) == FORKED
    _PRCTL(_PDEATHSIG, 0, 0, 0, 0)
    connection.close()
    return told if is_forked else -1
