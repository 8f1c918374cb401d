"""What torchrun starts for each rank, in place of the script: the stub.

`python -I -S stub.py script PATH ARGUMENT ...`, or `module NAME ARGUMENT ...`. It forks the rank's
keeper (keeper.py), or has warm.py fork it, and waits for its exit code: to torchrun, a rank runs
until the launcher has decided how the job ends. So torchrun ends and restarts no rank; and its
SIGKILL, 30 s or more after it has begun to end itself, hits only a stub. The stub tells its keeper
when torchrun, or whoever signals all processes, signals it.

For warm.py, which has imported torch, it passes its streams; the fork reads all else that a new
process would inherit from the stub in /proc. The fork writes FORKED, and later, as the keeper, the
exit code. If the connection ends before FORKED, because warm.py was killed, the stub forks its
keeper itself: a rank has one keeper, whenever that happens.

Python compiles this file for each rank, but keeper.py only once: so this file is short.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # see lines.py
import _socket
import os
import sys

FORKED = b"f"
_SECONDS = 60.0  # for warm.py to fork, including unfinished imports


def have_forked(path: str) -> int:
    """Have warm.py fork the keeper; return the socket to it, or -1 without a fork.

    Until then, this process ends like any other: at a stop, and with torchrun.
    """
    import select

    import lines  # type: ignore[import-not-found]

    lines.prctl(lines.PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    warm, heard = _socket.socket(_socket.AF_UNIX), b""
    with lines.suppress(OSError):  # it has ended; the launcher logs that
        warm.connect(path)
        streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
        warm.sendmsg([b"\n"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
        if not select.select([warm], [], [], _SECONDS)[0]:
            os.kill(warm.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED), signal.SIGKILL)
        heard = warm.recv(1)
    lines.prctl(lines.PDEATHSIG, 0, 0, 0, 0)
    if heard == FORKED:
        return int(warm.detach())
    warm.close()
    return -1


def main() -> None:
    """Have the keeper forked; wait for an exit code, and exit with it."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    told = tells = -1  # the ends of a socket, the stub's and the keeper's
    warm = os.path.join(os.environ["LAUNCHER_RUN_DIR"], "warm")
    if os.path.exists(warm):
        told = have_forked(warm)
    if told < 0:
        told, tells = (end.detach() for end in _socket.socketpair())
    stub = os.getpid()

    def tell(number: int, frame: object) -> None:
        """Tell the keeper: the launcher must know that torchrun ends."""
        if os.getpid() == stub:  # not in the fork, which has not replaced this yet
            try:
                os.write(told, bytes([number]))
            except OSError:  # the keeper was killed
                pass

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, tell)
    if tells >= 0:
        import keeper  # type: ignore[import-not-found]

        if os.fork() == 0:
            os.close(told)
            keeper.execute(sys.argv[1:], *keeper.keep(dict(os.environ), tells))
        os.close(tells)
    try:
        (code,) = os.read(told, 1)
    except (OSError, ValueError):  # the keeper was killed, perhaps before it had read all
        code = 1
    os._exit(code)


if __name__ == "__main__":
    main()
