"""What the ranks of this host and its torchrun report to the launcher, while they run.

Each of them connects to a Unix socket in the attempt's folder and sends lines of JSON. A rank
(rank.py) reports who it is, waits for go before its script runs, and reports what ended it if that
was an exception or sys.exit; else that its script has ended. torchrun (agent.py) requests the start
of ranks, is sent their pids and exit codes, as they are the launcher's children, requests the close
before it would end them, and reports what it raised. Its pid and exit code are needed where another
program runs it, which may pass on neither signals nor codes. `sm-launch stacks` requests here where
all ranks are.
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
from collections.abc import Collection, Mapping
from typing import Any, Callable

from launcher.host.system import System
from launcher.peers.messages import StacksRequest
from launcher.result.causes import by_foreign_signal
from launcher.result.last_words import last_words
from launcher.result.raised import Link, may_be_killed, read
from launcher.run.events import (
    ChildEnded,
    CloseRequested,
    OrphanEnded,
    RankEnded,
    RankExits,
    RankNotStarted,
    RankRuns,
    ReachedRendezvous,
    Reply,
    ScriptEnded,
    StartRequested,
    ThreadRaised,
    TorchrunEnded,
    TorchrunRuns,
)
from launcher.text.protocol import Lines, decoded, encoded, send
from launcher.text.words import printable, signal_name
from launcher.watch.host import Watch
from launcher.watch.stacks import CRASHES, GATHER_SECONDS, crash_in

WITHOUT_A_CODE = "it ended without an exit code"
_LINE_LIMIT = 1 << 20  # bytes; a rank sends less (describe.py)
_KILLED = 400  # characters of what it says of a process of its own
_MOST_IGNORED = 20  # invalid messages that the log shows
# After these a reply of the coordinator's has come, or never will.
_STACKS_REPLY_SECONDS = GATHER_SECONDS + 1.0
# Exit codes of a process that passes on a child's, which was killed: as shells do it, and sys.exit.
_OF_A_KILL = (128 + signal.SIGKILL, -signal.SIGKILL & 0xFF)


class Reports:
    """The receiving end of one attempt; calls take(event) for all that they report (events.py).

    `runner` is the program that runs torchrun, if it does not run by itself; `torchrun` is
    torchrun's pid, 0 while it does not run. `last_lines` returns the end of what a rank has
    written, "" if that is not known. Raises LaunchError if there can be no socket in folder.
    """

    def __init__(
        self,
        folder: str,
        system: System,
        take: Callable[[Any], None],
        watch: Watch,
        runner: str = "",
        last_lines: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self.torchrun = 0
        self._system, self._take, self._watch, self._runner = system, take, watch, runner
        self._folder, self._last_lines = folder, last_lines
        self._replying: dict[socket.socket, int] = {}  # pids of ranks that report their progress
        self._stacks_requests: set[socket.socket] = set()
        self._request_again_at = -math.inf  # until then the coordinator has the request
        self._ignored = 0
        self._torchrun_at: socket.socket | None = None
        self._request: Any = None
        self._last_report: tuple[int | None, str] = (None, "")  # torchrun's exit code, and error
        self._pids: dict[socket.socket, int] = {}  # of ranks that have reported who they are
        self._local: dict[int, int] = {}  # local ranks of those that torchrun starts, by rank
        self._ranks: dict[int, int] = {}  # of those that were there, by pid
        self.exit_codes: dict[int, int] = {}  # of what was reaped, by pid
        self._ends: deque[Any] = deque()  # to be taken in when all is read that was sent before
        self._oom_kills = system.oom_kills()
        self._connections: set[socket.socket] = set()
        self._is_full = False  # there is no descriptor for another connection
        self._undecided: list[RankNotStarted] = []  # until there is one
        self._listener = system.listen_in(folder)
        system.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close every socket, and report nothing more: the next attempt may have begun."""
        self.close_sockets()
        self._ends.clear()

    def close_sockets(self) -> None:
        """Close every socket; ends are reported all the same."""
        for one in (self._listener, *self._connections):
            with contextlib.suppress(KeyError, ValueError):  # it is full, or closed already
                self._system.selector.unregister(one)
            one.close()
        self._connections.clear()

    # What is due.

    @property
    def pids(self) -> list[int]:
        """Those of the ranks that are known here, and have not ended."""
        return [pid for pid in self._ranks if pid not in self.exit_codes]

    @property
    def known(self) -> Collection[int]:
        """The pids of all ranks that were there."""
        return self._ranks.keys()

    @property
    def has_more(self) -> bool:
        """Whether ends are to be taken in once nothing else is to be read."""
        return bool(self._ends)

    def take_ends(self) -> None:
        """Give ends on, now that nothing else is to be read."""
        while self._ends:
            event = self._ends.popleft()
            if isinstance(event, RankNotStarted) and not self._is_no_rank(event):
                continue
            if isinstance(event, OrphanEnded) and event.pid in self._ranks:
                event = self._end_of(event.pid, event.exit_code)
            if isinstance(event, TorchrunEnded):
                event = self._with_last_report(event)
            if isinstance(event, (TorchrunEnded, ChildEnded)):
                is_killed = event.returncode == -signal.SIGKILL
                event = event._replace(oom=self._oom() if is_killed else "")
            if isinstance(
                event, (RankEnded, RankNotStarted)
            ):  # before the reply that may follow from it
                self._send({"rank": self._ranks[event.pid], "exit_code": event.exit_code})
            self._take(event)

    def child_ended(self, event: Any) -> None:
        """Have an event taken in once all is read that was sent before."""
        if isinstance(event, OrphanEnded):
            self.exit_codes[event.pid] = event.exit_code  # nobody may send it a signal any more
        self._ends.append(event)

    # Replies to torchrun, requests to ranks.

    def reply(self, action: Reply) -> None:
        """Let torchrun go on."""
        self._send({"request": self._request, "depart": action.depart})

    def reply_to_rank(self, pid: int, *, lets_go: bool) -> None:
        """Let a rank's script run, or have the rank end before; torchrun knows the pid by then."""
        self._send({"rank": self._ranks[pid], "pid": pid})
        for connection in [one for one, known in self._pids.items() if known == pid]:
            if lets_go:
                with contextlib.suppress(OSError):
                    send(connection, b"go")
            else:
                self._disconnected(connection)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._torchrun_at:
            try:
                send(self._torchrun_at, encoded(message))
            except OSError:
                pass  # it was killed while it waited

    def request(self, request: Mapping[str, Any]) -> None:
        """Send ranks a request; one that does not read is not waited for."""
        for connection in self._replying:
            with contextlib.suppress(OSError):
                send(connection, encoded(request))

    def reply_stacks(self, message: Mapping[str, Any]) -> None:
        """Reply to all who have requested the stacks."""
        self._request_again_at = -math.inf
        while self._stacks_requests:
            with contextlib.suppress(OSError):
                send(self._stacks_requests.pop(), encoded(message))

    # Connections.

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # On the first of 1,000 hosts. They wait in the kernel until one is closed.
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
                return  # what was reported has ended the attempt
            if connection in self._replying and line[:1] != b"{":  # faulthandler has written it
                text = line.decode("utf-8", "backslashreplace")
                self._watch.wrote(self._replying[connection], text)
                continue
            try:
                event = self._event_of(connection, decoded(line))
            except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
                self._ignored += 1
                if self._ignored <= _MOST_IGNORED:
                    self._system.log(f"ignoring an invalid message from a rank: {line[:200]!r}")
                continue
            if event is not None:
                self._take(event)
        if not data:
            self._disconnected(connection)

    def _disconnected(self, connection: socket.socket) -> None:
        self._system.selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()
        if self._is_full:
            self._is_full = False
            self._ends.extend(self._undecided)
            self._undecided.clear()
            self._system.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._stacks_requests.discard(connection)
        if connection in self._replying:
            self._watch.disconnected(self._replying.pop(connection))
        # Its process may go on: it may replace itself (os.execv), or close all descriptors.
        self._pids.pop(connection, None)
        if connection is self._torchrun_at:
            self._torchrun_at = None
            self._torchrun_gone()

    def _torchrun_gone(self) -> None:
        pid, self.torchrun = self.torchrun, 0
        if not self._runner:
            return  # its process is ours: we see how it ends
        code, error = self._last_report
        if code is None and not error:
            code = self._system.exit_state(pid)[1]  # if what runs it has not reaped it yet
            if not code:
                code, error = None, WITHOUT_A_CODE
        # What runs it waits for its end, which we may see later; unless that was killed itself.
        last = self._ends[-1] if self._ends else None
        is_before = isinstance(last, ChildEnded) and last.returncode >= 0
        self._ends.insert(len(self._ends) - is_before, TorchrunEnded(code, error))

    def _with_last_report(self, event: TorchrunEnded) -> TorchrunEnded:
        """Return how torchrun ended, with what it raised, or that somebody told it to end."""
        code, error = self._last_report
        is_told = code is None and bool(error) and event.returncode not in (0, None)
        return TorchrunEnded(None if is_told else event.returncode, event.error or error)

    # What messages say.

    def _event_of(self, connection: socket.socket, message: Mapping[str, Any]) -> Any:
        """Return the event that a message is, if any; raise one of several errors if not valid."""
        if "pid" in message:
            return self._rank_runs(connection, _pid(message["pid"]), int(message["rank"]))
        if "poll" in message or "stacks" in message:
            self._watch.replied(self._replying[connection], message, self._system.now())
            return None
        if "watch" in message:
            names = ("watch", "rank", "local_rank", "signal")
            pid, rank, local, number = (int(message[name]) for name in names)
            if pid in self._pids.values():
                self._replying[connection] = pid
                local = self._local.get(rank, local)  # its own is 0 with --virtual-local-rank
                self._watch.connected(pid, rank, local, number, self._system.now())
            return None
        if "script_ended" in message:
            about = ("script_ended", "rank", "local_rank")
            pid, rank, local = (int(message[name]) for name in about)
            if self._pids[connection] != pid:
                raise ValueError(pid)
            self._watch.script_ended(pid, rank, self._local.get(rank, local), self._system.now())
            return ScriptEnded(pid)
        if "want_stacks" in message:
            self._stacks_requests.add(connection)
            if self._system.now() < self._request_again_at:
                return None
            self._request_again_at = self._system.now() + _STACKS_REPLY_SECONDS
            return StacksRequest()
        if "end" in message:
            end = message["end"]
            code, chain = int(end["exit_code"]), read([Link(**link) for link in end["chain"]])
            killed = printable(str(end.get("killed") or "")[:_KILLED])
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
            self._forget_earlier(self.torchrun)
            self._torchrun_at, self._last_report = connection, (None, "")
            return TorchrunRuns()
        return self._event_of_torchrun(message) if connection is self._torchrun_at else None

    def _event_of_torchrun(self, message: Mapping[str, Any]) -> Any:
        if "at_rendezvous" in message:
            return ReachedRendezvous()
        self._request = message.get("request", self._request)
        if "starts" in message:
            self._local = {int(rank): int(local) for rank, local in message["starts"]}
            self._ranks.clear()
            ranks = tuple(self._local.items())
            return StartRequested(ranks, bool(message["keeps_store"]), int(message["world"]))
        if "not_started" in message:
            about = message["not_started"]
            pid, rank = _pid(about["pid"]), int(about["rank"])
            end = RankNotStarted(pid, rank, self._local[rank], int(about["exit_code"]))
            self._ends.append(end)  # unless what it has become is about to be read
            return None
        if "cold" in message:
            self._system.log(f"starting ranks cold: {printable(str(message['cold']))}.")
            return None
        if "no_log" in message:
            file = printable(str(message["no_log"]))
            self._system.log(f"cannot write {file}; the job continues without it.")
            return None
        if "close" in message:
            number, error = int(message.get("signal") or 0), str(message.get("error") or "")
            self._ends.append(CloseRequested(number, error, message.get("tees") is True))
        elif "exit_code" in message:
            code, error = int(message["exit_code"]), str(message.get("error") or "")
            number = int(message.get("signal") or 0)
            self._last_report = (None, by_foreign_signal(number)) if number else (code, error)
        return None

    # Ranks' processes.

    def _rank_runs(self, connection: socket.socket, pid: int, rank: int) -> RankRuns | None:
        """Note a rank; one that torchrun does not start, or has started already, is not let go."""
        if rank not in self._local or rank in self._ranks.values():
            self._disconnected(connection)
            return None
        self._system.add_leader(pid)  # its session is the job's, also after it
        self._note_reaped(pid)
        self._pids[connection], self._ranks[pid] = pid, rank
        return RankRuns(pid, rank, self._local[rank])

    def _is_no_rank(self, event: RankNotStarted) -> bool:
        """Tell whether what has ended is sure not to have become a rank; then none may come."""
        if event.rank in self._ranks.values():
            return False
        if self._is_full:
            self._undecided.append(event)  # the rank may wait for a descriptor
            return False
        self._ranks[event.pid] = event.rank
        self.exit_codes[event.pid] = event.exit_code
        return True

    def _note_reaped(self, pid: int) -> None:
        """Have the end of a rank taken in after this: it may have been before, as an orphan's."""
        if not self._forget_earlier(pid) and pid in self.exit_codes:
            end = OrphanEnded(pid, self.exit_codes[pid])
            self._ends.extend([end] if end not in self._ends else ())

    def _forget_earlier(self, pid: int) -> bool:
        """Tell whether a process has this pid; then what was reaped was an earlier one with it."""
        if not self._system.state_of(pid):
            return False
        self.exit_codes.pop(pid, None)
        return True

    def _end_of(self, pid: int, exit_code: int) -> RankEnded:
        event = RankEnded(pid, exit_code)
        if exit_code == -signal.SIGKILL:
            return event._replace(oom=self._oom() or "no out-of-memory kill was recorded")
        if exit_code in _OF_A_KILL:
            return event._replace(oom=self._oom())
        if exit_code and -exit_code in CRASHES:
            calls = crash_in(self._system.crash(self._folder, pid), -exit_code)
            said = ""
            if exit_code == -signal.SIGABRT:
                said = last_words(self._last_lines(self._ranks[pid]))
            return event._replace(calls=calls, at=self._system.time_of_day(), said=said)
        return event

    def _oom(self) -> str:
        """Return that an out-of-memory kill was recorded since the start, "" if none was."""
        for where, count in self._system.oom_kills().items():
            if count > self._oom_kills.get(where, count):
                return f"out of memory: {where} recorded an OOM kill (oom_kill)"
        return ""


def _pid(value: Any) -> int:
    """Return the pid of one process: 0 and less stand for others (kill(2)). Raises ValueError."""
    pid = int(value)
    if not 0 < pid < 1 << 31:
        raise ValueError(value)
    return pid
