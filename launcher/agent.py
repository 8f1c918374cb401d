"""Runs torch.distributed.run in a child process and reports what ended it.

torchrun turns every failure into exit code 1 and, for a script without `@record`, writes no
error file. What it does know is in the ChildFailedError that it raises: each failed rank of
this host with its own exit code or signal. This file hands that to the launcher.

Executed by path: `python launcher/agent.py TORCHRUN_ARGUMENT ...`. It is the one file of the
launcher that imports torch. Without a launcher to report to it is plain torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import sys
import tempfile
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def report(run_dir: str, message: dict[str, Any]) -> None:
    """Send one message to the launcher whose socket is in run_dir (see reports.py)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(os.path.join(run_dir, "socket"))
            connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the launcher is gone, and nobody is left to be told


def refuse(run_dir: str, message: str) -> NoReturn:
    """End as argparse does for arguments that it does not take, without its usage text."""
    report(run_dir, {"torchrun": message})
    sys.exit(2)


def arguments(torchrun: Any, run_dir: str | None) -> Any:
    """Parse this process's arguments as torchrun does.

    Only its own parser knows which words of --launcher-torchrun-args are options, values or
    the script, so that is where it comes out if they would run something else than rank.py.
    """
    parser = torchrun.get_args_parser()
    if run_dir is None:
        return parser.parse_args(sys.argv[1:])
    parser.error = lambda message: refuse(run_dir, message)
    parser.print_help = lambda *_: None
    parser.exit = lambda *_: refuse(run_dir, "its arguments ask for its help, not for a job")
    parsed = parser.parse_args(sys.argv[1:])
    if parsed.training_script != os.path.join(HERE, "rank.py"):
        refuse(run_dir, f"unrecognized arguments: {parsed.training_script}")
    if parsed.module or parsed.no_python or parsed.run_path:
        refuse(run_dir, "its arguments would run the script past the launcher")
    return parsed


def run(run_dir: str | None) -> None:
    """Run torchrun with this process's arguments, and raise what it raises."""
    import torch
    from torch.distributed import run as torchrun

    parsed = arguments(torchrun, run_dir)
    if torch.__version__ < (2, 5) and parsed.local_addr:
        # It makes MASTER_ADDR of what the host calls itself, which other hosts may not be able
        # to resolve; 2.5 is the first to take --local-addr, as the launcher passes it.
        socket.getfqdn = lambda name="": parsed.local_addr
    exit_barrier = os.environ.get("LAUNCHER_EXIT_BARRIER")
    if exit_barrier:
        # torchrun waits 300 s at its end for hosts that still train, then takes the store away
        # from them. There is no option; this is the agent's own parameter.
        from torch.distributed.launcher import api

        api.LocalElasticAgent = functools.partial(
            api.LocalElasticAgent, exit_barrier_timeout=float(exit_barrier)
        )
    torchrun.run(parsed)


def main() -> int:
    """Run torchrun; return the exit code it would have had, and tell the launcher why."""
    run_dir = os.environ.get("LAUNCHER_RUN_DIR")
    if run_dir is None:
        run(run_dir)
        return 0
    # A launcher that is killed cannot end its torchrun: then the kernel stops it (prctl(2)).
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # Until torchrun has handlers a stop is to end it at once; Python's own for SIGINT would
    # wait for torch's C++ to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # torchrun leaves its log folder behind; in here it goes when the job does.
    tempfile.tempdir = run_dir
    try:
        run(run_dir)
    except Exception as error:
        kind = type(error).__name__  # by name: what cannot be imported cannot be caught
        if kind == "ChildFailedError":
            failed = [
                {"rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode}
                for rank, failure in error.failures.items()  # type: ignore[attr-defined]
            ]
            report(run_dir, {"failures": failed})
            return 1
        if kind == "SignalException":
            return 1  # the launcher knows: it sent the signal
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        report(run_dir, {"torchrun": f"{kind}: {error}{cause}"})
        raise
    return 0


if __name__ == "__main__":
    # This folder's modules (errors, plan ...) must not stand in for anybody's.
    sys.path[:] = [path for path in sys.path if path != HERE]
    exit_code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, full, closed
            stream.flush()
    # All is done and told. Python itself would take torch apart first, for 0.5 s (torch 2.13).
    os._exit(exit_code)
