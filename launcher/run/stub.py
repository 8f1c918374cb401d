"""What torchrun starts for each rank, in place of the script: the stub.

`python -I -S stub.py script PATH ARGUMENT ...`, or `module NAME ARGUMENT ...`. It forks the rank's
keeper (keeper.py) and waits for its exit code: to torchrun, a rank runs until the launcher has
decided how the job ends. So torchrun ends and restarts no rank; and its SIGKILL, 30 s after it has
begun to end itself, hits only a stub. If the keeper is killed, the stub ends its leftovers.

Python compiles this file for each rank, but keeper.py only once: so this file is short.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # see lines.py
import os
import sys


def main() -> None:
    """Fork the keeper; wait for an exit code, and exit with it."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    if warm := os.environ.pop("LAUNCHER_WARM", ""):
        sys.path.insert(0, os.path.join(os.path.dirname(here), "warm"))
        import handover  # type: ignore[import-not-found]

        handover.be_stub(warm)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    told, tells = os.pipe()
    import keeper  # type: ignore[import-not-found]

    keeper.adopt_orphans()
    if os.fork() == 0:
        os.close(told)
        keeper.main(tells)
    os.close(tells)
    if code := os.read(told, 1):
        os._exit(code[0])
    keeper.end_all(float(os.environ.get("LAUNCHER_STUB_GRACE", "10")))


if __name__ == "__main__":
    main()
