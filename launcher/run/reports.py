"""What the ranks of this host and its torchrun tell the launcher, while they run.

Each of them connects to a Unix socket in the job's folder and sends lines of JSON. A rank (rank.py)
says who it is before its script runs, and what ended it if that was an exception or sys.exit; else
that its script has ended.
torchrun (agent.py) asks before it starts ranks, says their pids, asks again before it would end
them, and says what it raised. Its pid and exit code are needed where another program runs it, which
may pass on neither signals nor codes. `sm-launch stacks` asks here where all ranks are.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import selectors
import signal
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from launcher.host.system import System
from launcher.peers.messages import StacksRequest
from launcher.result.causes import told_to_end
from launcher.result.raised import Link, may_be_killed, read
from launcher.run.events import (
    Answer,
    ChildEnded,
    CloseRequested,
    RankEnded,
    RankExits,
    RankRuns,
    RanksStarted,
    ReachedRendezvous,
    ScriptEnded,
    StartRequested,
    ThreadRaised,
    TorchrunEnded,
    TorchrunRuns,
)
from launcher.text.protocol import Lines, decoded, encoded, send
from launcher.text.words import signal_name
from launcher.watch.host import Watch
from launcher.watch.stacks import CRASHES, crash_in

WITHOUT_A_CODE = "it ended without an exit code"
_LINE_LIMIT = 1 << 20  # bytes; a rank sends less (describe.py)
_MOST_IGNORED = 20  # invalid messages that the log shows
_TO_SHOW = 4.0  # s, after which an answer of the coordinator's has come, or never will
# Seconds between two looks at a process that cannot be waited for: at first, and after a while.
_SOON, _MOST = 0.01, 1.0
# Exit codes of a process that passes on a child's, which was killed: as shells do it, and sys.exit.
_OF_A_KILL = (128 + signal.SIGKILL, -signal.SIGKILL & 0xFF)


class Reports:
    """The receiving end of one attempt; calls tell(event) for each thing that is said (events.py).

    `runner` is the program that runs torchrun, if it does not run by itself; `torchrun` is
    torchrun's pid, 0 while it does not run. Raises LaunchError if there can be no socket in folder.
    """

    def __init__(
        self,
        folder: str,
        system: System,
        tell: Callable[[Any], None],
        watch: Watch,
        runner: str = "",
    ) -> None:
        self.torchrun = 0
        self._system, self._tell, self._watch, self._runner = system, tell, watch, runner
        self._folder = folder
        self._asked: dict[socket.socket, int] = {}  # pids of ranks that say how far they are
        self._wants_stacks: set[socket.socket] = set()
        self._ask_again_at = -math.inf  # until then the coordinator has been asked for them
        self._ignored = 0
        self._torchrun_at: socket.socket | None = None
        self._question: Any = None
        self._said_at_end: tuple[int | None, str] = (None, "")  # torchrun's exit code, and error
        self._pids: dict[socket.socket, int] = {}  # of ranks that have said who they are
        self._local: dict[int, int] = {}  # pids of ranks by local rank
        self._watched: set[int] = set()  # of these, whose ends the kernel tells
        self._looks: dict[int, float] = {}  # seconds until a pid is looked at again
        self._look_at = 0.0
        self._ends: deque[Any] = deque()  # to be told when all is read that was said before
        self._oom_kills = system.oom_kills()
        self._connections: set[socket.socket] = set()
        self._is_full = False  # no descriptor is left for another connection
        self._listener = system.listen_in(folder)
        system.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close every socket, and tell nothing more: the next attempt may have begun."""
        self.hang_up()
        self._ends.clear()
        self._looks.clear()

    def hang_up(self) -> None:
        """Close every socket; ends are told all the same."""
        for one in (self._listener, *self._connections):
            with contextlib.suppress(KeyError, ValueError):  # it is full, or closed already
                self._system.selector.unregister(one)
            one.close()
        self._connections.clear()

    # What is due.

    @property
    def pids(self) -> list[int]:
        """Those of the ranks that are known here, and have not ended."""
        return [pid for pid in self._local.values() if not any(self._system.exit_state(pid))]

    @property
    def has_more(self) -> bool:
        """Whether ends are to be told once nothing else is to be read."""
        return bool(self._ends)

    def timeout(self) -> float | None:
        """Return in how many seconds `look` is due; None: never, as while all ranks run."""
        if self._ends:
            return 0
        return min(self._looks.values(), default=None)

    def look(self, *, is_quiet: bool) -> None:
        """Tell of ends once nothing else is to be read; look at what cannot be waited for."""
        if self._looks and self._system.now() >= self._look_at:
            for pid, seconds in list(self._looks.items()):
                self._looks[pid] = min(2 * seconds, _MOST)
                if self._has_ended(pid):
                    del self._looks[pid]
            self._look_at = self._system.now() + (self.timeout() or 0)
        while is_quiet and self._ends:
            event = self._ends.popleft()
            if isinstance(event, TorchrunEnded):
                event = self._with_last_word(event)
            if isinstance(event, (TorchrunEnded, ChildEnded)):
                is_killed = event.returncode == -signal.SIGKILL
                event = event._replace(oom=self._oom() if is_killed else "")
            self._tell(event)

    def ended(self, pid: int, exit_code: int) -> None:
        """A child has been reaped: a rank that torchrun left, or what is not of interest here."""
        if pid in self._local.values():
            self._note_end(pid, exit_code)

    def child_ended(self, event: Any) -> None:
        """Have an event told once all is read that was said before."""
        self._ends.append(event)

    # Torchrun is told.

    def answer(self, action: Answer) -> None:
        """Let torchrun go on."""
        self._reply({"question": self._question, "leave": action.leave})

    def tell_signalled(self, pids: Iterable[int]) -> None:
        """Tell torchrun's agent which ranks are told to end, in case this process is killed."""
        self._reply({"signalled": list(pids)})

    def _reply(self, message: Mapping[str, Any]) -> None:
        if self._torchrun_at:
            try:
                send(self._torchrun_at, encoded(message))
            except OSError:
                pass  # it was killed while it waited

    def ask(self, question: Mapping[str, Any]) -> None:
        """Ask ranks how far they are; one that does not read is not waited for."""
        for connection in self._asked:
            with contextlib.suppress(OSError):
                send(connection, encoded(question))

    def show_stacks(self, message: Mapping[str, Any]) -> None:
        """Give the stacks to all who want to see them."""
        self._ask_again_at = -math.inf
        while self._wants_stacks:
            with contextlib.suppress(OSError):
                send(self._wants_stacks.pop(), encoded(message))

    # Connections.

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # On the first of 1,000 hosts. They wait in the kernel until one has hung up.
                self._system.selector.unregister(self._listener)
                self._is_full = True
            return
        connection.setblocking(False)
        self._connections.add(connection)
        act = functools.partial(self._receive, connection, Lines(_LINE_LIMIT))
        self._system.selector.register(connection, selectors.EVENT_READ, act)

    def _receive(self, connection: socket.socket, lines: Lines) -> None:
        try:
            data = connection.recv(65536)
            complete = lines.feed(data)
        except (OSError, ValueError):
            data, complete = b"", []
        for line in complete:
            if connection not in self._connections:
                return  # what was told has ended the attempt
            if connection in self._asked and line[:1] != b"{":  # faulthandler has written it
                text = line.decode("utf-8", "backslashreplace")
                self._watch.wrote(self._asked[connection], text)
                continue
            try:
                event = self._heard(connection, decoded(line))
            except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
                self._ignored += 1
                if self._ignored <= _MOST_IGNORED:
                    self._system.log(f"ignoring an invalid message from a rank: {line[:200]!r}")
                continue
            if event is not None:
                self._tell(event)
        if not data:
            self._hung_up(connection)

    def _hung_up(self, connection: socket.socket) -> None:
        self._system.selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()
        if self._is_full:
            self._is_full = False
            self._system.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._wants_stacks.discard(connection)
        if connection in self._asked:
            self._watch.disconnected(self._asked.pop(connection))
        pid = self._pids.pop(connection, None)
        # Its process may go on: it may replace itself (os.execv), or close all descriptors.
        if pid is not None and pid not in self._watched and not self._has_ended(pid):
            self._looks[pid] = _SOON
            self._look_at = self._system.now() + _SOON
        if connection is self._torchrun_at:
            self._torchrun_at = None
            self._torchrun_gone()

    def _torchrun_gone(self) -> None:
        pid, self.torchrun = self.torchrun, 0
        if not self._runner:
            return  # its process is ours: we see how it ends
        code, error = self._said_at_end
        if code is None and not error:
            code = self._system.exit_state(pid)[1]  # if what runs it has not reaped it yet
            if not code:
                code, error = None, WITHOUT_A_CODE
        # What runs it waits for its end, of which we may hear later; unless that was killed itself.
        last = self._ends[-1] if self._ends else None
        is_before = isinstance(last, ChildEnded) and last.returncode >= 0
        self._ends.insert(len(self._ends) - is_before, TorchrunEnded(code, error))

    def _with_last_word(self, event: TorchrunEnded) -> TorchrunEnded:
        """Return how torchrun ended, with what it raised, or that somebody told it to end."""
        code, error = self._said_at_end
        is_told = code is None and bool(error) and event.returncode not in (0, None)
        return TorchrunEnded(None if is_told else event.returncode, event.error or error)

    # What is said.

    def _heard(self, connection: socket.socket, message: Mapping[str, Any]) -> Any:
        """Return the event that a message is, if any; raise one of several errors if not valid."""
        if "pid" in message:
            pid, rank, local = _rank(message[name] for name in ("pid", "rank", "local_rank"))
            self._started(pid, local)
            self._pids[connection] = pid
            return RankRuns(pid, rank, local)
        if "poll" in message or "stacks" in message:
            self._watch.replied(self._asked[connection], message, self._system.now())
            return None
        if "watch" in message:
            names = ("watch", "rank", "local_rank", "signal")
            pid, rank, local, number = (int(message[name]) for name in names)
            if pid in self._pids.values():
                self._asked[connection] = pid
                self._watch.connected(pid, rank, local, number, self._system.now())
            return None
        if "script_ended" in message:
            about = ("script_ended", "rank", "local_rank")
            pid, rank, local = (int(message[name]) for name in about)
            if self._pids[connection] != pid:
                raise ValueError(pid)
            self._watch.script_ended(pid, rank, local, self._system.now())
            return ScriptEnded(pid)
        if "want_stacks" in message:
            self._wants_stacks.add(connection)
            if self._system.now() < self._ask_again_at:
                return None
            self._ask_again_at = self._system.now() + _TO_SHOW
            return StacksRequest()
        if "end" in message:
            end = message["end"]
            code, chain = int(end["exit_code"]), read([Link(**link) for link in end["chain"]])
            killed = _killed(end.get("killed"))
            is_sure = code in _OF_A_KILL or killed.endswith(signal_name(signal.SIGKILL))
            oom = self._oom() if is_sure or may_be_killed(chain) else ""
            return RankExits(self._pids[connection], code, chain, oom, killed)
        if "thread" in message:
            chain = read([Link(**link) for link in message["chain"]])
            oom = self._oom() if may_be_killed(chain) else ""
            raised = ThreadRaised(self._pids[connection], str(message["thread"]), chain, oom)
            return raised if chain else None
        if "torchrun_pid" in message:
            self.torchrun = _pid(message["torchrun_pid"])
            self._torchrun_at, self._said_at_end = connection, (None, "")
            return TorchrunRuns()
        return self._heard_from_torchrun(message) if connection is self._torchrun_at else None

    def _heard_from_torchrun(self, message: Mapping[str, Any]) -> Any:
        if "meets" in message:
            return ReachedRendezvous()
        self._question = message.get("question")
        if "starts" in message:
            self._local.clear()
            return StartRequested()
        if "ranks" in message:
            ranks = [_rank(one) for one in message["ranks"]]
            for pid, _, local in ranks:
                self._started(pid, local)
            return RanksStarted(ranks, bool(message["keeps_store"]), int(message["world"]))
        if "ends" in message:
            for local, code in message["ends"].items():
                if code is not None and int(local) in self._local:
                    self._note_end(self._local[int(local)], int(code))
            number, error = int(message.get("signal") or 0), str(message.get("error") or "")
            self._ends.append(CloseRequested(number, error, message.get("tees") is True))
        elif "exit_code" in message:
            code, error = int(message["exit_code"]), str(message.get("error") or "")
            number = int(message.get("signal") or 0)
            self._said_at_end = (None, told_to_end(number)) if number else (code, error)
        return None

    # Ranks' processes.

    def _started(self, pid: int, local_rank: int) -> None:
        if self._local.get(local_rank) != pid:
            if self._system.watch(pid, self._ended):
                self._watched.add(pid)
            self._local[local_rank] = pid

    def _ended(self, pid: int) -> None:
        if not self._has_ended(pid):
            self._note_end(pid, None)

    def _has_ended(self, pid: int) -> bool:
        has_ended, exit_code = self._system.exit_state(pid)
        if has_ended or exit_code:
            self._note_end(pid, exit_code)
            return True
        return False  # it is ending well, or goes on without its connection

    def _note_end(self, pid: int, exit_code: int | None) -> None:
        event = RankEnded(pid, exit_code)
        if exit_code == -signal.SIGKILL:
            event = event._replace(oom=self._oom() or "no out-of-memory kill was recorded")
        elif exit_code in _OF_A_KILL:
            event = event._replace(oom=self._oom())
        elif exit_code and -exit_code in CRASHES:
            calls = crash_in(self._system.crash(self._folder, pid), -exit_code)
            event = event._replace(calls=calls, at=self._system.time_of_day())
        self._ends.append(event)

    def _oom(self) -> str:
        """Return that an out-of-memory kill was recorded since the start, "" if none was."""
        for where, count in self._system.oom_kills().items():
            if count > self._oom_kills.get(where, count):
                return f"out of memory: {where} counted a kill (oom_kill)"
        return ""


def _rank(values: Iterable[Any]) -> tuple[int, int, int]:
    """Return the pid, rank and local rank of a message. Raises one of several errors."""
    pid, rank, local = values
    return _pid(pid), int(rank), int(local)


def _killed(values: Any) -> str:
    """Return that a rank's process was killed, in words; "" if none was. Raises several errors."""
    if not values:
        return ""
    name, pid, number = values
    return f"its process {name} (pid {_pid(pid)}) was killed by {signal_name(int(number))}"


def _pid(value: Any) -> int:
    """Return the pid of one process: 0 and less stand for others (kill(2)). Raises ValueError."""
    pid = int(value)
    if not 0 < pid < 1 << 31:
        raise ValueError(value)
    return pid
