"""Runs torch.distributed.run in a child process and reports what ended it.

torchrun turns every failure into exit code 1 and, for a script without `@record`, writes no
error file. What it does know is in the ChildFailedError that it raises: each failed
rank of this host with its own exit code or signal. This file hands that to the launcher.

Executed by path: `python launcher/agent.py TORCHRUN_ARGUMENT ...`. It is the one file of the
launcher that imports torch. Without a launcher to report to it is plain torchrun.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from typing import Any, NoReturn


def report(run_dir: str, message: dict[str, Any]) -> None:
    """Send one message to the launcher whose socket is in run_dir (see reports.py)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(os.path.join(run_dir, "socket"))
            connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the launcher is gone, and nobody is left to be told


def refuse(run_dir: str, message: str) -> NoReturn:
    """End as argparse does for arguments that torchrun does not take, without its usage text."""
    report(run_dir, {"torchrun": message})
    sys.exit(2)


def main() -> int:
    """Run torchrun with this process's arguments; return the exit code it would have had."""
    run_dir = os.environ.get("LAUNCHER_RUN_DIR")
    if run_dir:
        # torchrun leaves its log folder behind; in here it goes when the job does.
        tempfile.tempdir = run_dir

    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = torchrun.get_args_parser()
    if run_dir:
        parser.error = lambda message: refuse(run_dir, message)
    arguments = parser.parse_args(sys.argv[1:])
    if torch.__version__ < (2, 5) and arguments.local_addr:
        # It makes MASTER_ADDR of what the host calls itself, which other hosts may not be able
        # to resolve; 2.5 is the first to take --local-addr, as the launcher passes it.
        socket.getfqdn = lambda name="": arguments.local_addr

    try:
        torchrun.run(arguments)
    except ChildFailedError as error:
        if not run_dir:
            raise
        failures = [
            {"rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode}
            for rank, failure in error.failures.items()
        ]
        report(run_dir, {"failures": failures})
        return 1
    except SignalException:
        if not run_dir:
            raise
        return 1  # the launcher knows: it sent the signal
    except Exception as error:
        if run_dir:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            report(run_dir, {"torchrun": f"{type(error).__name__}: {error}{cause}"})
        raise
    return 0


if __name__ == "__main__":
    # This folder's modules (errors, plan ...) must not stand in for anybody's.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.exit(main())
