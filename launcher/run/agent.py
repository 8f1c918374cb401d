"""Runs torch.distributed.run in a child process, which leaves its ranks to the launcher.

torchrun starts ranks, with the launcher's permission. It ends none: it would signal each rank's
whole process group, so that data loaders' workers die while it saves. Nor does it restart any: that
is another torchrun's attempt.

Executed by path, with torchrun's arguments. Without a launcher to report to it is plain torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import queue
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

# What torchrun raises for a setting that it cannot use.
WRONG_VALUES = (
    *(ValueError, KeyError),
    *(FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError),
)
HERE = os.path.dirname(os.path.abspath(__file__))


class Unread:
    """torchrun's stderr, which nobody may be reading: torchrun never waits for a reader.

    It logs a signal that ends it before it acts on it. What torch's C++ writes by itself does not
    come here.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._texts: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._lost = 0
        threading.Thread(target=self._run, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Have a text written; what --tee copies is written here and now, for none to be lost."""
        if _is_tail():
            return int(self._stream.write(text))
        if self._texts.qsize() >= 1000:
            self._lost += 1
        elif self._lost:
            self._texts.put(f"{self._lost} lines of torchrun's log were not written.\n{text}")
            self._lost = 0
        else:
            self._texts.put(text)
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Have texts written."""
        for text in texts:
            self.write(text)

    def flush(self) -> None:
        """Wait for nobody, but what --tee copies comes at once, as without us."""
        if _is_tail():
            self._stream.flush()

    def end(self) -> None:
        """Wait until all is written, but no longer than a second."""
        done = threading.Event()
        self._texts.put(done)
        done.wait(1)

    def _run(self) -> None:
        while True:
            text = self._texts.get()
            if isinstance(text, threading.Event):
                text.set()
                continue
            data = text.encode(errors="backslashreplace")
            while data:
                try:
                    data = data[os.write(2, data) :]
                except BlockingIOError:
                    select.select([], [2], [])
                except OSError:  # full, closed
                    break


def _is_tail() -> bool:
    """Tell whether this is a thread of torch's TailLog, which has time to wait for a reader."""
    return threading.current_thread().name.startswith("TailLog")


class AgentConnection:
    """Torchrun's, to the launcher whose socket is in a folder (reports.py).

    Raises OSError if it is gone.
    """

    def __init__(self, run_dir: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(os.path.join(run_dir, "socket"))
        self._replies = self._connection.makefile("rb")
        self._requests = 0
        self.signalled: set[int] = set()  # pids of ranks that have got a stop
        self.report({"torchrun_pid": os.getpid()})

    def report(self, message: dict[str, Any]) -> None:
        """Send a message that has no reply."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request; return the reply, an empty one if the launcher is gone."""
        self._requests += 1
        self.report({**message, "request": self._requests})
        with contextlib.suppress(OSError, ValueError):
            while True:
                answer = dict(json.loads(self._replies.readline()))
                self.signalled.update(answer.get("signalled", ()))
                if answer.get("request") == self._requests:  # and not one that a signal cut short
                    return answer
        return {}

    def refuse(self, message: str) -> NoReturn:
        """End as argparse does for arguments that it does not take, without its usage text."""
        self.report({"exit_code": 2, "error": message})
        sys.exit(2)


def arguments(torchrun: Any, launcher: AgentConnection | None) -> Any:
    """Parse this process's arguments as torchrun does; they may run nothing else than rank.py.

    Only its own parser tells options of --launcher-torchrun-args from values and the script.
    """
    parser = torchrun.get_args_parser()
    if launcher is None:
        return parser.parse_args()
    parser.error = launcher.refuse
    parser.print_help = lambda *_: None
    parser.exit = lambda *_: launcher.refuse("its arguments ask for its help, not for a job")
    parsed = parser.parse_args()
    if parsed.training_script != os.path.join(HERE, "rank.py"):
        launcher.refuse(f"unrecognized arguments: {parsed.training_script}")
    return parsed


def error_text(error: BaseException) -> str:
    """Return what torchrun raised for a reason of its own, in one line."""
    return f"{type(error).__name__}: {error}" + (f" ({error.__cause__})" if error.__cause__ else "")


@contextlib.contextmanager
def stops_later() -> Iterator[None]:
    """Put a stop off to the end of the block."""
    late: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: late.append(number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if late:
            os.kill(os.getpid(), late[0])


class HeldAgent:
    """What torchrun's agent does in another way, for the launcher to own the ranks.

    As its documentation has it ("Extending the Agent"): a class of LocalElasticAgent, with
    `launcher`; `is_host`: torchrun's store is here; `tees`: it copies what ranks write; and
    `agents`, those that there are. All that is used here is the same in torch 2.4 to 2.15.
    """

    launcher: AgentConnection
    is_host: bool
    tees: bool
    agents: list[Any]
    # The launcher decides when ranks are restarted, each time with a new torchrun.
    attempt = int(os.environ.get("LAUNCHER_ATTEMPT", "1"))

    def __init__(self, *args: Any, **options: Any) -> None:
        # torchrun takes its store away from hosts that train 300 s longer; it has no option.
        if exit_barrier := os.environ.get("LAUNCHER_EXIT_BARRIER"):
            options["exit_barrier_timeout"] = float(exit_barrier)
        super().__init__(*args, **options)
        self._remaining_restarts: int = self._remaining_restarts - self.attempt + 1
        if self.attempt > 1:  # what ranks read as TORCHELASTIC_RUN_ID is the job's
            rendezvous = self._worker_group.spec.rdzv_handler  # type: ignore[attr-defined]
            run_id = rendezvous.get_run_id().removesuffix(f"-{self.attempt}")
            rendezvous.get_run_id = lambda: run_id
        self.agents.append(self)

    def _start_workers(self, worker_group: Any) -> Any:
        if not self.launcher.request({"starts": True}):
            depart(1)  # the launcher is gone
        with stops_later():  # torchrun would forget the ranks that it has started
            pids = super()._start_workers(worker_group)  # type: ignore[misc]
            context = self._pcontext  # type: ignore[attr-defined]
            context.close = functools.partial(self._end, context, context.close)
            workers = {one.local_rank: one.global_rank for one in worker_group.workers}
            ranks = [(pid, workers[local], local) for local, pid in pids.items()]
            # From torch 2.5 on ranks' store is in the torchrun of group rank 0.
            keeps_store = self.is_host or worker_group.group_rank == 0
            world = worker_group.workers[0].world_size
            self.launcher.report({"ranks": ranks, "keeps_store": keeps_store, "world": world})
        return pids

    def _end(self, context: Any, close: Any, death_sig: Any = None, timeout: Any = 30) -> None:
        """Wait until the launcher has ended the ranks; then have torchrun see that they have.

        torchrun calls this also after a success, and several times.
        """
        answer: dict[str, Any] = {}
        if not getattr(context, "was_answered", False):
            error, message = sys.exc_info()[1], dict[str, Any](ends=exit_codes(context))
            message["tees"] = self.tees
            if type(error).__name__ == "SignalException":
                message["signal"] = error.sigval  # type: ignore[union-attr]
            elif error:
                message["error"] = error_text(error)
            if set(message["ends"].values()) != {0}:
                self._stop_keep_alive()
            answer = self.launcher.request(message)
            context.was_answered = True
            if not answer:
                self._end_ranks(context, message.get("signal") or signal.SIGTERM, timeout)
                death_sig = signal.SIGKILL
        close(death_sig, timeout)
        if answer.get("depart"):
            depart(1)

    def _stop_keep_alive(self) -> None:
        with contextlib.suppress(AttributeError):  # it would log a stack trace each 5 s
            group = self._worker_group  # type: ignore[attr-defined]
            group.spec.rdzv_handler._keep_alive_timer._ctx.stop_event.set()  # of a store that ends

    def _end_ranks(self, context: Any, number: int, seconds: float) -> None:
        """The launcher was killed: end the ranks that have not got a stop."""
        with stops_later():
            for one in context.subprocess_handlers.values():
                if one.proc.poll() is None and one.proc.pid not in self.launcher.signalled:
                    one.proc.send_signal(number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and None in exit_codes(context).values():
                time.sleep(0.05)


def attach(launcher: AgentConnection, *, is_host: bool, tees: bool) -> list[Any]:
    """Have torchrun use our agent; return those that it makes."""
    from torch.distributed.launcher import api

    agents: list[Any] = []
    own = {"launcher": launcher, "is_host": is_host, "tees": tees, "agents": agents}
    api.LocalElasticAgent = type("Agent", (HeldAgent, api.LocalElasticAgent), own)
    return agents


def exit_codes(context: Any) -> dict[int, int | None]:
    """Return how ranks ended, by local rank; None for those that run."""
    return {rank: one.proc.poll() for rank, one in context.subprocess_handlers.items()}


def depart(code: int) -> NoReturn:
    """End this process, with all that it has to say written."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # none, full, closed
        sys.stdout.flush()
    if isinstance(sys.stderr, Unread):
        sys.stderr.end()
    # All is done and reported. Python itself would take torch apart first, for 0.5 s (torch 2.13).
    os._exit(code)


def depart_from_store(agent: Any, *, is_host: bool) -> None:
    """Depart from torchrun's store; the host that keeps it goes last, else others log a trace."""
    everybody = "launcher/all departed"
    deadline = time.monotonic() + 5  # a host that was killed just now does not depart
    with contextlib.suppress(Exception):
        if agent._store.add("launcher/departed", 1) == agent._worker_group.group_world_size:
            agent._store.set(everybody, "")  # which waits for no answer
        while is_host and time.monotonic() < deadline and not agent._store.check([everybody]):
            time.sleep(0.01)  # which a stop ends; it would not end a wait of the store's own


def be_reached_at(address: str) -> None:
    """Have torchrun from 2.5 on make MASTER_ADDR of an address, not of the name in --local-addr."""
    from torch.distributed.elastic.rendezvous import api, dynamic_rendezvous

    build, handler = api.RendezvousStoreInfo.build, dynamic_rendezvous.DynamicRendezvousHandler
    create = handler._create_tcp_store_server

    def build_at(rank: int, store: Any, *_: Any, **how: Any) -> Any:
        if "local_addr" in how:
            how["local_addr"] = address
        return build(rank, store, **how)

    api.RendezvousStoreInfo.build = staticmethod(build_at)
    handler._create_tcp_store_server = lambda self, _, port: create(self, address, port)


def run(launcher: AgentConnection | None) -> int:
    """Run torchrun with this process's arguments; raise what it raises, or return 0."""
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.events.handlers import get_logging_handler

    parsed = arguments(torchrun, launcher)
    is_host = "is_host=1" in parsed.rdzv_conf.split(",")
    agents = []
    if launcher:
        agents = attach(launcher, is_host=is_host, tees=parsed.tee != "0")
    address = os.environ.get("LAUNCHER_MASTER_ADDR") or parsed.local_addr
    if torch.__version__ >= (2, 5):
        if address != parsed.local_addr:
            be_reached_at(address)
    elif address:  # it makes MASTER_ADDR of what the host calls itself
        socket.getfqdn = lambda name="": address
    if launcher:
        launcher.report({"at_rendezvous": True})
    try:
        get_logging_handler(getattr(parsed, "event_log_handler", "null"))
        torchrun.run(parsed)
    except WRONG_VALUES as error:
        if launcher is None or agents:
            raise
        launcher.refuse(error_text(error))  # it has begun nothing with its settings
    for agent in agents:
        depart_from_store(agent, is_host=is_host)
    return 0


def main() -> int:
    """Run torchrun; return the exit code it would have had, and report why."""
    if (run_dir := os.environ.get("LAUNCHER_RUN_DIR")) is None:
        return run(None)
    # A launcher that is killed cannot end its torchrun: then the kernel stops it (prctl(2)).
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    try:
        launcher = AgentConnection(run_dir)
    except OSError:
        return 1  # it has been killed before
    # Until torchrun has handlers a stop ends it at once; Python's own would wait for torch's C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # An early warning is for ranks; Slurm may send it to all processes of a step.
    for warning in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(warning) == signal.SIG_DFL:
            signal.signal(warning, lambda *_: None)  # not SIG_IGN, which ranks would inherit
    tempfile.tempdir = run_dir  # with it goes the log folder that torchrun leaves behind
    try:
        run(launcher)
    except Exception as error:
        # By name: what cannot be imported cannot be caught. Of ranks the launcher knows.
        name = type(error).__name__
        if name not in ("ChildFailedError", "SignalException"):
            launcher.report({"exit_code": 1, "error": error_text(error)})
            raise
        number = error.sigval if name == "SignalException" else 0  # type: ignore[attr-defined]
        launcher.report({"exit_code": 1, "signal": number})
        return 1
    launcher.report({"exit_code": 0})
    return 0


if __name__ == "__main__":
    # This folder's modules must not stand in for anybody's.
    sys.path[:] = [path for path in sys.path if path != HERE]
    if sys.stderr is not None:
        sys.stderr = Unread(sys.stderr)  # before torch makes its loggers
    try:
        exit_code = main()
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else 1
    except Exception:
        traceback.print_exc()
        exit_code = 1
    depart(exit_code)
