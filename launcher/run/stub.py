"""What torchrun starts for each rank, in place of the script: the stub.

`python -I -S stub.py script PATH ARGUMENT ...`, or `module NAME ARGUMENT ...`. It forks the rank's
keeper (keeper.py), or has warm.py fork it, and waits for its exit code: to torchrun, a rank runs
until the launcher has decided how the job ends. So torchrun ends and restarts no rank; and its
SIGKILL, 30 s or more after it has begun to end itself, hits only a stub. The stub tells its keeper
when torchrun, or whoever signals all processes, signals it.

Python compiles this file for each rank, but keeper.py only once: so this file is short.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # see lines.py
import _socket
import os
import sys


def main() -> None:
    """Have the keeper forked; wait for an exit code, and exit with it."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    told = tells = -1  # the ends of a socket, the stub's and the keeper's
    warm = os.path.join(os.environ["LAUNCHER_RUN_DIR"], "warm")
    if os.path.exists(warm):
        sys.path.insert(0, os.path.join(os.path.dirname(here), "warm"))
        import handover  # type: ignore[import-not-found]

        told = handover.have_forked(warm)
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
