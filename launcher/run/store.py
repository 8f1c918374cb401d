"""Holds the stores of a job's ranks, on the first host of a job that may restart.

Executed by path with the descriptor of its socket to the launcher: for each line from there it
makes a store, and reports its port. From torch 2.5 on torchrun's own store keeps the keys of the
last attempt, so that ranks of the next would connect to dead addresses; a store in rank 0 would end
with that rank, while others may still need it. It imports torch while the first attempt trains, and
ends with the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any


def main() -> None:
    """Make stores until the launcher is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if sys.path[:1] == [os.path.dirname(os.path.realpath(__file__))]:
        del sys.path[0]  # this folder's modules must not hide others
    launcher = socket.socket(fileno=int(sys.argv[1]))
    launcher.settimeout(None)  # sitecustomize may have called setdefaulttimeout()
    stores: list[Any] = []
    for _ in launcher.makefile("rb"):
        message: dict[str, Any]
        try:
            from torch.distributed import TCPStore

            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            stores = [*stores[-1:], store]  # ranks may still use the previous one
            message = {"port": store.port}
        except Exception as error:
            message = {"port": 0, "why": f"{type(error).__name__}: {error}"}
        launcher.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
    os._exit(0)
