"""How a stub has warm.py, which has imported torch, fork its keeper.

    stub       Request, with its descriptors    -> warm.py, which forks
    stub       FORKED                           <- the fork, which is as this process by then
    stub       GO                               -> the fork, whose fork is the keeper
    stub       an exit code                     <- the keeper

All of this happens on one connection. A stub that has given up does not send GO; a stub that gets
no reply starts its keeper itself: so a rank has one keeper, whenever warm.py is killed.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # see lines.py
import _socket as socket
import array
import ctypes
import os
import sys

from lines import decoded, encoded, suppress  # type: ignore[import-not-found]  # of run/

TYPE_CHECKING = False  # typing takes 2 ms
if TYPE_CHECKING:
    from typing import Any

FORKED, GO = b"f", b"g"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SECONDS = 60.0  # for a fork of the keeper, including unfinished imports
_DESCRIPTORS = 3  # stdin, stdout, stderr
_PRCTL = ctypes.CDLL(None).prctl
_PDEATHSIG = 1  # PR_SET_ of linux/prctl.h


def be_stub(path: str) -> None:
    """Have the keeper forked; exit with its code. Return if this process must start it.

    Before the fork, this process ends like any other: at a stop, and with torchrun.
    """
    _PRCTL(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_SECONDS)
    is_forked = False
    try:
        connection.connect(path)
        _send(connection)
        is_forked = connection.recv(1) == FORKED
    except socket.timeout:  # TimeoutError, from Python 3.10 on
        _kill_listener(connection)  # the launcher then logs it
    except OSError:  # it has ended; the launcher logs that
        pass
    for number in STOPS if is_forked else ():
        signal.signal(number, signal.SIG_IGN)
    _PRCTL(_PDEATHSIG, 0, 0, 0, 0)
    if not is_forked:
        connection.close()
        return
    connection.settimeout(None)
    code = b""
    with suppress(OSError):
        connection.sendall(GO)
        code = connection.recv(1)
    os._exit(code[0] if code else 1)


def _send(connection: socket.socket) -> None:
    """Send what a new process would inherit from this one, but not from the launcher.

    Raises OSError.
    """
    message = {
        "words": sys.argv[1:],
        "environ": dict(os.environ),
        "affinity": [*os.sched_getaffinity(0)],
        "policy": memory_policy(),
    }
    data, descriptors = encoded(message), array.array("i", range(_DESCRIPTORS))
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    sent = connection.sendmsg([data], passed)
    connection.sendall(data[sent:])


def memory_policy() -> str:
    """Return this process's policy for memory (numactl), usually "default": see numa(7)."""
    with suppress(OSError, IndexError), open("/proc/self/numa_maps") as file:
        return file.readline().split()[1]
    return "default"


def _kill_listener(connection: socket.socket) -> None:
    """Kill the process at the other end: it cannot fork a keeper for this rank later."""
    with suppress(OSError):
        pid = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED)  # of struct ucred
        os.kill(pid, signal.SIGKILL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a stub's request, and its descriptors. Raises OSError or ValueError."""
    room = socket.CMSG_LEN(4 * _DESCRIPTORS)
    data, ((_, _, passed), *_), _, _ = connection.recvmsg(1 << 16, room)
    while data[-1:] != b"\n" and (more := connection.recv(1 << 16)):
        data += more
    return decoded(data), [*array.array("i", passed)]


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Become like the stub, except for its environment. Raises OSError."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.sched_setaffinity(0, request["affinity"])
