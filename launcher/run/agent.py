"""Runs torch.distributed.run in a child process, and has it work with the launcher.

torchrun turns every failure into exit code 1 and, for a script without `@record`, writes no
error file. What it does know is in the ChildFailedError that it raises: each failed rank of
this host with its own exit code or signal. This file hands that to the launcher.

torchrun ends ranks when it is told to stop, when one has failed, and when it restarts them. It
signals each rank's whole process group, so data loaders' workers die while their rank saves. Here
the signal goes to the rank's own process, and torchrun asks the launcher first: what a rank does
after the answer is not the cause of a failure.

Executed by path: `python launcher/run/agent.py TORCHRUN_ARGUMENT ...`. It is the one file of the
launcher that imports torch. Without a launcher to report to it is plain torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tell(run_dir: str, message: dict[str, Any]) -> dict[str, Any]:
    """Send a message to the launcher whose socket is in run_dir (reports.py); wait for its answer.

    Returns an empty one if the launcher is gone: then nobody is left to be told.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(os.path.join(run_dir, "socket"))
            connection.sendall(json.dumps(message).encode() + b"\n")
            return dict(json.loads(connection.makefile().readline()))
    except (OSError, ValueError):
        return {}


def refuse(run_dir: str, message: str) -> NoReturn:
    """End as argparse does for arguments that it does not take, without its usage text."""
    tell(run_dir, {"torchrun": message})
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
    return parsed


def error_text(error: BaseException) -> str:
    """Return what torchrun raised for a reason of its own, in one line."""
    cause = f" ({error.__cause__})" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}{cause}"


def attach(run_dir: str) -> None:
    """Have torchrun ask the launcher before it ends ranks, and before it starts them again.

    The classes and methods are the same in torch 2.4 to 2.15.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        subprocess_handler as handlers,
    )
    from torch.distributed.launcher import api

    agents: list[Any] = []
    start_context = SubprocessContext._start
    close_context = SubprocessContext._close
    kill_group = handlers.SubprocessHandler.close

    class Agent(api.LocalElasticAgent):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            # torchrun waits 300 s at its end for hosts that still train, then takes the store
            # away from them. There is no option; this is the agent's own parameter.
            exit_barrier = os.environ.get("LAUNCHER_EXIT_BARRIER")
            if exit_barrier:
                options["exit_barrier_timeout"] = float(exit_barrier)
            super().__init__(*args, **options)
            self._is_restart = False
            agents.append(self)

        def _initialize_workers(self, worker_group: Any) -> None:
            if self._is_restart:
                tell(run_dir, {"starting": True})
            self._is_restart = True
            super()._initialize_workers(worker_group)

    def start(context: Any) -> None:
        """Start all ranks before acting on a stop: torchrun would forget those it has started."""
        late: list[int] = []
        handlers = {
            number: signal.signal(number, lambda number, _: late.append(number))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
            if callable(signal.getsignal(number))
        }
        try:
            start_context(context)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if late:
                os.kill(os.getpid(), late[0])

    def close(context: Any, death_sig: signal.Signals, timeout: float = 30) -> None:
        """Ask the launcher before ending ranks; torchrun also calls this after success."""
        codes = {rank: one.proc.poll() for rank, one in context.subprocess_handlers.items()}
        living = None in codes.values()
        if living or (any(codes.values()) and not getattr(context, "was_closed", False)):
            context.was_closed = True
            error = sys.exc_info()[1]
            message: dict[str, Any] = {"exit_codes": codes}
            if isinstance(error, SignalException):
                message["closing"] = "stop"
                death_sig = error.sigval
            elif error:
                message.update(closing="error", torchrun=error_text(error))
            elif any(codes.values()) and not agents[-1]._remaining_restarts:
                message["closing"] = "failure"
            else:  # another host's ranks are restarted, or ours
                message["closing"] = "restart"
            timeout = tell(run_dir, message).get("timeout", timeout)
        close_context(context, death_sig, timeout)
        if living:
            codes = {rank: one.proc.poll() for rank, one in context.subprocess_handlers.items()}
            tell(run_dir, {"exit_codes": codes})

    def close_rank(handler: Any, death_sig: signal.Signals | None = None) -> None:
        if death_sig == signal.SIGKILL:
            kill_group(handler, death_sig)
        elif not getattr(handler, "was_told", False):  # by a failure, or a restart, before a stop
            handler.was_told = True
            handler.proc.send_signal(death_sig or signal.SIGTERM)

    api.LocalElasticAgent = Agent
    SubprocessContext._start = start
    SubprocessContext._close = close
    handlers.SubprocessHandler.close = close_rank


def be_reached_at(address: str) -> None:
    """Have torchrun from 2.5 on keep the ranks' store at an address: it becomes MASTER_ADDR.

    It takes what --local-addr says, by which it also sorts the hosts: a name, that this host may
    not be able to look up.
    """
    from torch.distributed.elastic.rendezvous import api, dynamic_rendezvous

    build = api.RendezvousStoreInfo.build
    handler = dynamic_rendezvous.DynamicRendezvousHandler
    create = handler._create_tcp_store_server

    def build_at(rank: int, store: Any, *_: Any, **how: Any) -> Any:
        if "local_addr" in how:
            how["local_addr"] = address
        return build(rank, store, **how)

    api.RendezvousStoreInfo.build = staticmethod(build_at)
    handler._create_tcp_store_server = lambda self, _, port: create(self, address, port)


def run(run_dir: str | None) -> None:
    """Run torchrun with this process's arguments, and raise what it raises."""
    import torch
    from torch.distributed import run as torchrun

    parsed = arguments(torchrun, run_dir)
    if run_dir is not None:
        attach(run_dir)
    address = os.environ.get("LAUNCHER_MASTER_ADDR") or parsed.local_addr
    if torch.__version__ < (2, 5):
        # It makes MASTER_ADDR of what the host calls itself, which other hosts may not be able
        # to resolve; 2.5 is the first to take --local-addr, as the launcher passes it.
        if address:
            socket.getfqdn = lambda name="": address
    elif address != parsed.local_addr:
        be_reached_at(address)
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
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
            if launcher.connect_ex(os.path.join(run_dir, "socket")):
                return 1  # it has been killed before
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
            tell(run_dir, {"failures": failed})
            return 1
        if kind == "SignalException":
            return 1  # the launcher knows: it sent the signal
        tell(run_dir, {"torchrun": error_text(error)})
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
