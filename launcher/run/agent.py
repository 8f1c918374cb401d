"""Runs torch.distributed.run in a child process, which leaves its ranks to the launcher.

torchrun starts ranks, with the launcher's permission. It ends none while the launcher is there: it
would signal each rank's whole process group, so that data loaders' workers die while it saves. Nor
does it restart any: that is another torchrun's attempt.

Executed by path, with torchrun's arguments. Without a launcher to report to it is plain torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import json
import math
import os
import queue
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any, Callable, NoReturn

# What torchrun raises for a setting that it cannot use.
WRONG_VALUES = (
    *(ValueError, KeyError),
    *(FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError),
)
HERE = os.path.dirname(os.path.abspath(__file__))
_TAIL_SECONDS = 1.0  # for what --tee copies, once the launcher was killed and no rank is left
_STARTED_SECONDS = 0.02  # between two looks at a process that is to become a rank
_ending = threading.Lock()  # of the thread that ends this process


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
    """The launcher whose socket is in a folder (reports.py). Raises OSError if it is gone.

    A thread reads its messages, apart from the main thread, in which a signal may raise anywhere.
    Once the launcher was killed, that thread ends the ranks and this process: the main thread may
    wait for other hosts, in torch's C++, where it hears of nothing.

    `pids` and `exit_codes` are those of the ranks, its children, by rank; `ranks` are those that
    torchrun has started; `grace` is how many seconds ranks have to end once it was killed.
    """

    def __init__(self, run_dir: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(os.path.join(run_dir, "socket"))
        self._requests, self._reply = 0, dict[str, Any]()
        self._news = threading.Condition()
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        self.ranks: list[Rank] = []
        self.grace = 30.0  # torchrun's own
        self._is_gone = False
        self.report({"torchrun_pid": os.getpid()})
        threading.Thread(target=self._run, daemon=True).start()

    def report(self, message: dict[str, Any]) -> None:
        """Send a message that has no reply."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request; return the reply."""
        self._requests += 1
        number = self._requests
        self.report({**message, "request": number})
        # Not the reply to one that a signal has cut short.
        self.wait(lambda: self._reply.get("request") == number)
        return self._reply

    def rank(self, rank: int, started: subprocess.Popen[bytes] | None) -> Rank:
        """Note a rank that torchrun has started."""
        self.ranks.append(Rank(self, rank, started))
        return self.ranks[-1]

    def wait(self, is_over: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until something is so, or the time is over; for the end if the launcher is gone."""
        with self._news:
            self._news.wait_for(lambda: self._is_gone or is_over(), seconds)
        if self._is_gone:
            depart(1)

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):
                self._read()
            with _ending:
                _ignore_stops()
                with self._news:
                    self._is_gone = True
                    self._news.notify_all()
                self._end_ranks()
                for rank in self.ranks:
                    rank.give_up()
                if self.ranks:
                    time.sleep(_TAIL_SECONDS)
                # A flush waits for a reader, who may never come.
                flush = threading.Thread(target=_flush, daemon=True)
                flush.start()
                flush.join(_TAIL_SECONDS)
        finally:
            os._exit(1)

    def _read(self) -> None:
        for line in self._connection.makefile("rb"):
            message = json.loads(line)
            with self._news:
                if "request" in message:
                    self._reply = message
                elif "pid" in message:
                    self.pids[message["rank"]] = message["pid"]
                else:
                    self.exit_codes[message["rank"]] = message["exit_code"]
                self._news.notify_all()

    def _end_ranks(self) -> None:
        """The kernel sends them SIGTERM (rank.py), we what they leave; what is late is killed."""
        deadline, signalled = time.monotonic() + self.grace, set[int]()
        left = {pid for rank, pid in self.pids.items() if rank not in self.exit_codes}
        while left:
            pids, groups = _running()
            left &= groups  # each rank leads one
            is_late = time.monotonic() >= deadline
            headless = left - pids - signalled
            for pid in left if is_late else headless:
                with contextlib.suppress(OSError):  # it has ended since; it is another user's
                    os.killpg(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            if is_late:
                break
            signalled |= headless
            time.sleep(0.1)

    def refuse(self, message: str) -> NoReturn:
        """End as argparse does for arguments that it does not take, without its usage text."""
        self.report({"exit_code": 2, "error": message})
        sys.exit(2)


def _running() -> tuple[set[int], set[int]]:
    """Return the pids and groups of all processes that run; zombies, not reaped yet, do not."""
    pids, groups = set[int](), set[int]()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, _, group, *_ = file.read().rpartition(b")")[2].split()
            if state not in (b"Z", b"X"):
                pids.add(int(name))
                groups.add(int(group))
    return pids, groups


def _ignore_stops() -> None:
    """Ignore all stops. Any thread may call it; signal.signal() is for the main thread alone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        ctypes.CDLL(None).signal(number, ctypes.c_void_p(1))  # SIG_IGN


def arguments(torchrun: Any, launcher: AgentConnection | None) -> Any:
    """Parse this process's arguments as torchrun does; they may run nothing else than rank.py.

    Only its own parser tells options of --launcher-torchrun-args from values and the script.
    """
    parser = torchrun.get_args_parser()
    if launcher is None:
        return parser.parse_args()
    parser.error = launcher.refuse
    parser.print_help = lambda *_: None
    parser.exit = lambda *_: launcher.refuse("its arguments ask for its help text, not for a job")
    parsed = parser.parse_args()
    if parsed.training_script != os.path.join(HERE, "rank.py"):
        launcher.refuse(f"unrecognized arguments: {parsed.training_script}")
    return parsed


def error_text(error: BaseException) -> str:
    """Return what torchrun raised for a reason of its own, in one line."""
    return f"{type(error).__name__}: {error}" + (f" ({error.__cause__})" if error.__cause__ else "")


class Rank:
    """A rank's process, as torchrun uses a Popen. It is the launcher's child, which reaps it.

    `started` is the process that became it, or tried to (rank.py): it ends when the launcher can
    tell which. There is none where it was forked.
    """

    def __init__(
        self, launcher: AgentConnection, rank: int, started: subprocess.Popen[bytes] | None
    ) -> None:
        self._launcher, self._rank, self._started = launcher, rank, started
        self._is_reported = False  # the end of `started`

    @property
    def pid(self) -> int:
        """The process's, once it is known."""
        pids = self._launcher.pids
        while self._rank not in pids and self.poll() is None:
            for rank in self._launcher.ranks:  # those behind this one, too
                rank.report_end()
            self._launcher.wait(lambda: self._rank in pids, _STARTED_SECONDS)
        return pids.get(self._rank, self._started.pid if self._started else 0)

    def report_end(self) -> None:
        """Report that `started` has ended, once: the launcher knows whether it became the rank."""
        code = self._started.poll() if self._started and not self._is_reported else None
        if self._started and code is not None:
            self._is_reported = True
            about = {"rank": self._rank, "pid": self._started.pid, "exit_code": code}
            self._launcher.report({"not_started": about})

    @property
    def returncode(self) -> int | None:
        """How it has ended, None if it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return how it has ended, None if it runs."""
        return self._launcher.exit_codes.get(self._rank)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"rank {self._rank}", timeout or 0)
            self._launcher.wait(lambda: self.poll() is not None, 0.1)
        return code

    def give_up(self) -> None:
        """End what was to become it, if it has not: the launcher does not wait for that."""
        if self._rank not in self._launcher.pids:
            self._launcher.exit_codes.setdefault(self._rank, -signal.SIGKILL)
            if self._started and self._started.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(self._started.pid, signal.SIGKILL)


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

    def __init__(self, *args: Any, **options: Any) -> None:
        # The launcher decides when ranks are restarted, each time with a new torchrun.
        self.attempt = int(os.environ.get("LAUNCHER_ATTEMPT", "1"))
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
        ranks = [(one.global_rank, one.local_rank) for one in worker_group.workers]
        # From torch 2.5 on ranks' store is in the torchrun of group rank 0.
        keeps_store = self.is_host or worker_group.group_rank == 0
        about = {"keeps_store": keeps_store, "world": worker_group.workers[0].world_size}
        self.launcher.request({"starts": ranks, **about})
        return super()._start_workers(worker_group)  # type: ignore[misc]

    def end(self, context: Any, close: Any, death_sig: Any = None, timeout: Any = 30) -> None:
        """Wait until the launcher has ended the ranks; then have torchrun see that they have.

        torchrun calls this also after a success, and several times.
        """
        reply: dict[str, Any] = {}
        if not getattr(context, "has_reply", False):
            error, message = sys.exc_info()[1], dict[str, Any](close=True, tees=self.tees)
            if type(error).__name__ == "SignalException":
                message["signal"] = error.sigval  # type: ignore[union-attr]
            elif error:
                message["error"] = error_text(error)
            ranks = self.launcher.ranks
            if any(rank.poll() != 0 for rank in ranks):
                self._stop_keep_alive()
            reply = self.launcher.request(message)
            context.has_reply = True
            for rank in ranks:
                rank.give_up()
        close(death_sig, timeout)
        if reply.get("depart"):
            depart(1)

    def _stop_keep_alive(self) -> None:
        with contextlib.suppress(AttributeError):  # it would log a stack trace each 5 s
            group = self._worker_group  # type: ignore[attr-defined]
            group.spec.rdzv_handler._keep_alive_timer._ctx.stop_event.set()  # of a store that ends


def open_log(folder: str, rank: int) -> Any:
    """Return the file that a rank is to write to. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"rank-{rank}.log")
    # It may be there already, as a pipe that nobody reads: no wait for that.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    file = io.FileIO(os.open(path, flags, 0o644), "w")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file", path)
    os.set_blocking(file.fileno(), True)
    return file


def attach(
    launcher: AgentConnection, nursery: Any, *, is_host: bool, tees: bool, logs: str
) -> list[Any]:
    """Have torchrun use our agent, and leave ranks to the launcher; return its agents.

    `logs` is the folder of the files that ranks write to, "" for none. What --tee and --redirects
    take is torchrun's.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext as Context
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler as Handler,
    )
    from torch.distributed.launcher import api

    def start(handler: Any, args: Any, env: dict[str, str]) -> Rank:
        nonlocal nursery
        rank = int(env["RANK"])
        if logs and not (handler._stdout and handler._stderr):
            try:
                file = open_log(logs, rank)
                handler._stdout, handler._stderr = handler._stdout or file, handler._stderr or file
            except OSError as error:  # a full disk
                launcher.report({"no_log": f"{error.filename} ({error.strerror})"})
        if nursery:
            why_not = nursery.fork(args, env, [handler._stdout, handler._stderr])
            if not why_not:
                return launcher.rank(rank, None)
            launcher.report({"cold": why_not})
            nursery = None  # for the other ranks, too
        return launcher.rank(rank, popen(handler, args, env))

    def close(handler: Any, death_sig: Any = None) -> None:
        for file in (handler._stdout, handler._stderr):  # ours, and of --redirects and --tee
            if file:
                file.close()

    def close_all(context: Any, death_sig: Any = None, timeout: Any = 30) -> None:
        close = functools.partial(close_context, context)
        agents[-1].end(context, close, death_sig, timeout)

    popen, Handler._popen, Handler.close = Handler._popen, start, close
    close_context, Context.close = Context.close, close_all  # a signal may come as ranks start
    agents: list[Any] = []
    own = {"launcher": launcher, "is_host": is_host, "tees": tees, "agents": agents}
    api.LocalElasticAgent = type("Agent", (HeldAgent, api.LocalElasticAgent), own)
    return agents


def depart(code: int) -> NoReturn:
    """End this process, with all that it has to say written; not while ranks are being ended."""
    _ignore_stops()
    _flush()
    with _ending:
        # All is done and reported. Python would take torch apart first, for 0.5 s (torch 2.13).
        os._exit(code)


def _flush() -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # none, full, closed
        sys.stdout.flush()
    if isinstance(sys.stderr, Unread):
        sys.stderr.end()


def depart_from_store(agent: Any, *, is_host: bool) -> None:
    """Depart from torchrun's store; the host that keeps it goes last, else others log a trace."""
    everybody = "launcher/all departed"
    deadline = time.monotonic() + 5  # a host that was killed just now does not depart
    with contextlib.suppress(Exception):
        if agent._store.add("launcher/departed", 1) == agent._worker_group.group_world_size:
            agent._store.set(everybody, "")  # which waits for no reply
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


def run(launcher: AgentConnection | None, nursery: Any) -> int:
    """Run torchrun with this process's arguments; raise what it raises, or return 0."""
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.events.handlers import get_logging_handler

    parsed = arguments(torchrun, launcher)
    is_host = "is_host=1" in parsed.rdzv_conf.split(",")
    agents, logs = [], os.environ.pop("LAUNCHER_RANK_LOGS", "")  # which ranks need not know
    if launcher:
        grace = getattr(parsed, "shutdown_timeout", None)  # from torch 2.12 on
        launcher.grace = launcher.grace if grace is None else grace
        tees = parsed.tee != "0"
        agents = attach(launcher, nursery, is_host=is_host, tees=tees, logs=logs)
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


def main(nursery: Any = None) -> int:
    """Run torchrun; return the exit code it would have had, and report why."""
    if (run_dir := os.environ.get("LAUNCHER_RUN_DIR")) is None:
        return run(None, None)
    try:
        launcher = AgentConnection(run_dir)
    except OSError:
        return 1  # it has been killed before
    if nursery:
        nursery.known()
    # Until torchrun has handlers a stop ends it at once; Python's own would wait for torch's C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # An early warning is for ranks; Slurm may send it to all processes of a step.
    for warning in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(warning) == signal.SIG_DFL:
            signal.signal(warning, lambda *_: None)  # not SIG_IGN, which ranks would inherit
    tempfile.tempdir = run_dir  # with it goes the log folder that torchrun leaves behind
    try:
        run(launcher, nursery)
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


def start(nursery: Any = None) -> NoReturn:
    """Run torchrun, and end as it ends; `nursery` forks its ranks, if there is one."""
    # A sitecustomize may make a subreaper of each Python: this one would adopt the ranks.
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
    # This folder's modules must not stand in for anybody's.
    sys.path[:] = [path for path in sys.path if path != HERE]
    if sys.stderr is not None:
        unread = Unread(sys.stderr)
        if nursery:  # else torch makes its loggers later
            _log_to(unread)
        sys.stderr = unread
    try:
        exit_code = main(nursery)
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else 1
    except Exception:
        traceback.print_exc()
        exit_code = 1
    depart(exit_code)


def _log_to(stream: Any) -> None:
    """Have loggers write to a stream that have written to stderr."""
    import logging

    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in [one for logger in loggers for one in getattr(logger, "handlers", ())]:
        # torch 2.14's own look for sys.stderr each time.
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setStream(stream)


if __name__ == "__main__":
    start()
