"""What the ranks of this host and its torchrun tell the launcher, while they run.

Each of them connects to a Unix socket in the job's folder and sends lines of JSON. A rank (rank.py)
says who it is as soon as it runs, and what ended it if that was an exception or sys.exit. A rank is
gone when its process is; its connection may end earlier, when the rank replaces itself (os.execv)
or closes all descriptors. torchrun (agent.py) says what its main raised. Before it ends ranks, or
starts them again, it asks and waits for the answer. Its pid and its exit code are needed where
another program runs it, which may pass on neither signals nor codes.
"""

from __future__ import annotations

import errno
import functools
import os
import selectors
import signal
import socket
from collections.abc import Mapping
from typing import Any, Callable

from launcher.errors import EXIT_HOST_LOST, LaunchError
from launcher.job.machine import oom_kills
from launcher.log import log
from launcher.processes import exit_state
from launcher.protocol import Lines, decoded, encoded, send
from launcher.result.causes import RankFailure
from launcher.result.raised import Link, read
from launcher.run.events import (
    ExitCodes,
    RankGone,
    RankIsFinal,
    RankSaid,
    RankStarted,
    TorchrunAsks,
    TorchrunEnded,
    TorchrunGone,
    TorchrunStarts,
    Why,
)
from launcher.run.watch import Watch

WITHOUT_A_CODE = "it ended without an exit code"
_LINE_LIMIT = 1 << 20  # bytes; a rank sends less (describe.py)


def of_both(ended: TorchrunEnded, gone: TorchrunGone | None, runner: str) -> TorchrunEnded:
    """Return how torchrun and the program that runs it ended: as torchrun did, if that failed.

    `ended` is how that program did; `gone` how torchrun did, None if it has not.
    """
    # If that program is killed, the kernel stops torchrun, which has no more to say (agent.py).
    was_stopped = ended.returncode < 0 and not (ended.failures or (gone and gone.says_why))
    if gone and gone.returncode and not was_stopped:
        return ended._replace(returncode=gone.returncode)
    if ended.returncode:
        return ended._replace(program=runner)
    if gone is None:
        error = "it did not run torchrun to its end"
        return ended._replace(returncode=1, error=error, program=runner)
    return ended


class Reports:
    """The receiving end; calls tell(event) for each thing that is said (run/events.py).

    `runner` is the program that runs torchrun, if it does not run by itself; `torchrun` its pid,
    0 while it does not run. Raises LaunchError if no socket can be made in run_dir.
    """

    def __init__(
        self,
        run_dir: str,
        selector: selectors.BaseSelector,
        tell: Callable[[Any], None],
        runner: str = "",
    ) -> None:
        self.torchrun = 0
        self._torchrun_at: socket.socket | None = None
        self._exit_code: int | None = None  # torchrun's, once it has ended
        self._runner = runner
        self._selector = selector
        self._tell = tell
        self._watch = Watch(selector, self._gone)
        self._oom_kills = oom_kills()
        self._error = ""  # what torchrun raised for a reason of its own
        self._failures: list[RankFailure] = []  # that torchrun named at its end
        self._pids: dict[socket.socket, int] = {}  # of ranks that have said who they are
        self._connections: set[socket.socket] = set()
        self._asking: tuple[socket.socket, Any] | None = None  # torchrun, and its question
        self._is_full = False  # no descriptor is left for another connection
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            self._listener.bind(os.path.join(run_dir, "socket"))
        except OSError as error:
            self._listener.close()
            raise LaunchError(f"cannot make a socket in {run_dir}: {error}; set TMPDIR.") from None
        self._listener.listen(128)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close every socket."""
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._watch.close()

    def timeout(self) -> float | None:
        """Return in how many seconds `look` is due; None: never, as while all ranks run."""
        return self._watch.timeout()

    def look(self) -> None:
        """See which of the ranks that cannot be waited for are gone."""
        self._watch.look()

    def answer(self, timeout: float | None) -> None:
        """Let torchrun go on, with so many seconds for the ranks to end (None: its own)."""
        if self._asking:
            self._reply(*self._asking, {} if timeout is None else {"timeout": timeout})
            self._asking = None

    def ended(self, returncode: int) -> TorchrunEnded:
        """Return how torchrun ended, with what it has said."""
        ended = TorchrunEnded(returncode, tuple(self._failures), self._error)
        if not self._runner:
            return ended
        known = self._exit_code is not None
        gone = TorchrunGone(self._exit_code or 0, self._error) if known else None
        return of_both(ended, gone, self._runner)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # On the first of 1,000 hosts. They wait in the kernel until one has hung up.
                self._selector.unregister(self._listener)
                self._is_full = True
            return
        connection.setblocking(False)
        self._connections.add(connection)
        act = functools.partial(self._receive, connection, Lines(_LINE_LIMIT))
        self._selector.register(connection, selectors.EVENT_READ, act)

    def _receive(self, connection: socket.socket, lines: Lines) -> None:
        try:
            data = connection.recv(65536)
            complete = lines.feed(data)
        except (OSError, ValueError):
            data, complete = b"", []
        for line in complete:
            try:
                events = self._heard(connection, decoded(line))
            except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
                log(f"ignoring an invalid message from a rank: {line[:200]!r}")
                continue
            for event in events:
                self._tell(event)
        if not data:
            self._hung_up(connection)

    def _hung_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()
        if self._is_full:
            self._is_full = False
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if self._asking and self._asking[0] is connection:
            self._asking = None
        pid = self._pids.pop(connection, None)
        if pid is not None:
            self._watch.add(pid)
        if connection is self._torchrun_at:
            self._torchrun_gone()

    def _torchrun_gone(self) -> None:
        pid, self.torchrun = self.torchrun, 0
        if not self._runner:
            return  # its process is ours: we see how it ends
        if self._exit_code is None:
            self._exit_code = exit_state(pid)[1]  # if what runs it has not reaped it yet
            if not self._exit_code:
                self._exit_code, self._error = EXIT_HOST_LOST, WITHOUT_A_CODE
        self._tell(TorchrunGone(self._exit_code, self._error))

    def _gone(self, pid: int, exit_code: int | None) -> None:
        self._tell(RankGone(pid, exit_code, self._oom(exit_code)))

    def _heard(self, connection: socket.socket, message: Mapping[str, Any]) -> list[Any]:
        """Return what a message says; raises one of several errors if it is not valid."""
        if "pid" in message:
            started = RankStarted(*(int(message[field]) for field in RankStarted._fields))
            self._pids[connection] = started.pid
            return [started]
        if "end" in message:
            end = message["end"]
            chain = read([Link(**link) for link in end["chain"]])
            said = (int(end["exit_code"]), chain, bool(end["final"]))
            return [RankSaid(self._pids[connection], *said)]
        if "final" in message:
            return [RankIsFinal(self._pids[connection])]
        return self._heard_from_torchrun(connection, message)

    def _heard_from_torchrun(
        self, connection: socket.socket, message: Mapping[str, Any]
    ) -> list[Any]:
        if "torchrun_pid" in message:
            self._torchrun_at, self._exit_code = connection, None
            self.torchrun = int(message["torchrun_pid"])
            return []
        if "exit_code" in message:
            self._exit_code = int(message["exit_code"])
        if "failures" in message:
            failures = [RankFailure(int(a), int(b), int(c)) for a, b, c in message["failures"]]
            self._failures = [one._replace(oom=self._oom(one.exit_code)) for one in failures]
        if "torchrun" in message:
            self._error = str(message["torchrun"])
        events: list[Any] = []
        codes = message.get("exit_codes", {}).items()
        reaped = {int(local_rank): int(code) for local_rank, code in codes if code is not None}
        if reaped:
            killed = -signal.SIGKILL in reaped.values()
            events.append(ExitCodes(reaped, self._oom(-signal.SIGKILL if killed else 0)))
        question = message.get("question")
        if "closing" in message:
            events.append(TorchrunAsks(Why(message["closing"]), self._error))
        elif "starting" in message:
            events.append(TorchrunStarts())
        else:
            self._reply(connection, question, {})
            return events
        self._asking = connection, question
        return events

    def _reply(self, connection: socket.socket, question: Any, answer: Mapping[str, Any]) -> None:
        try:
            send(connection, encoded({"question": question, **answer}))
        except OSError:
            pass  # it was killed while it waited

    def _oom(self, exit_code: int | None) -> str:
        """Return whether an out-of-memory kill was recorded since the start, for a SIGKILL."""
        if exit_code != -signal.SIGKILL:
            return ""
        for where, count in oom_kills().items():
            if count > self._oom_kills.get(where, count):
                return f"out of memory: {where} counted a kill (oom_kill)"
        return "no out-of-memory kill was recorded"
