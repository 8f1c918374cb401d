"""How a stub has its keeper forked by warm.py, which has imported torch, in place of itself.

    stub       Request, with its descriptors    -> warm.py, which forks
    stub       FORKED                           <- the fork, which is as this process by then
    stub       GO                               -> the fork, whose fork is the keeper
    stub       an exit code                     <- the keeper

All of that on one connection. A stub that has given up does not say GO; one that hears nothing more
starts its keeper itself: so a rank has one keeper, whenever warm.py is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys

TYPE_CHECKING = False  # typing takes 2 ms
if TYPE_CHECKING:
    from typing import Any

FORKED, GO = b"f", b"g"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SECONDS = 60.0  # for a keeper to be forked: for imports that have not ended, too
_DESCRIPTORS = 3  # stdin, stdout, stderr
_PRCTL = ctypes.CDLL(None).prctl
_PDEATHSIG = 1  # PR_SET_ of linux/prctl.h


def be_stub(path: str) -> None:
    """Have the keeper forked; end with its exit code. Return if it is to be started here.

    Until it is forked, this process ends as any would: at a stop, and with torchrun.
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
        _kill_listener(connection)  # which has the launcher say so
    except OSError:  # it has ended, as the launcher says
        pass
    for number in STOPS if is_forked else ():
        signal.signal(number, signal.SIG_IGN)
    _PRCTL(_PDEATHSIG, 0, 0, 0, 0)
    if not is_forked:
        connection.close()
        return
    connection.settimeout(None)
    code = b""
    with contextlib.suppress(OSError):
        connection.sendall(GO)
        code = connection.recv(1)
    os._exit(code[0] if code else 1)


def _send(connection: socket.socket) -> None:
    """Send all that a new process would have of this one. Raises OSError."""
    os.umask(umask := os.umask(0o22))
    resources = {n for name, n in vars(resource).items() if name.startswith("RLIMIT_")}
    message = {
        "words": sys.argv[1:],
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "limits": [(number, resource.getrlimit(number)) for number in resources],
        "affinity": [*os.sched_getaffinity(0)],
        "mask": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "policy": memory_policy(),
    }
    data = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(connection, [data], range(_DESCRIPTORS))
    connection.sendall(data[sent:])


def memory_policy() -> str:
    """Return this process's policy for memory (numactl), "default" as a rule: see numa(7)."""
    with contextlib.suppress(OSError, IndexError), open("/proc/self/numa_maps") as file:
        return file.readline().split()[1]
    return "default"


def _kill_listener(connection: socket.socket) -> None:
    """Kill the process at the other end: it cannot fork a keeper for this rank later."""
    with contextlib.suppress(OSError):
        pid = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED)  # of struct ucred
        os.kill(pid, signal.SIGKILL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what a stub hands over, and its descriptors. Raises OSError or ValueError."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, _DESCRIPTORS)
    while data[-1:] != b"\n" and (more := connection.recv(1 << 16)):
        data += more
    return json.loads(data), descriptors


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be as the stub, but for its environment. Raises OSError."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    for number, limits in request["limits"]:
        if resource.getrlimit(number) != tuple(limits):
            resource.setrlimit(number, limits)
    os.sched_setaffinity(0, request["affinity"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
