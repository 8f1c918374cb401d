"""The launcher's end of the connections to its keepers (keeper.py), and the events from there.

Keepers connect to a Unix socket in the job's folder; so does `sm-launch stacks`, which requests all
ranks' stacks. Messages of a script's process go to the watch or become events.
"""

from __future__ import annotations

import contextlib
import functools
import math
import selectors
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.errors import Disposition
from launcher.host.cgroups import risen
from launcher.host.system import System
from launcher.result.raised import Exit, Link, read
from launcher.run import events
from launcher.text import wire
from launcher.text.protocol import Lines, decoded, encoded, send
from launcher.text.words import printable
from launcher.watch.host import Watch
from launcher.watch.progress import StacksRequest
from launcher.watch.stacks import CRASHES, GATHER_SECONDS, frames_of, place

_LINE_LIMIT = 1 << 22  # bytes; a rank sends less (describe.py)
_LAST_FILES = 8  # descriptors that a job's end needs: /proc, folders to remove, imports
_STDERR = struct.pack("i", 2)
_MOST_IGNORED = 20  # invalid messages that the log shows
# After these the coordinator has replied, or never will.
_STACKS_REPLY_SECONDS = GATHER_SECONDS + 1.0
# Exit codes of a killed process, or of one that passes on a killed child's: shells', sys.exit's.
_OF_A_KILL = (-signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGKILL & 0xFF)


class Keepers:
    """All keepers of this host; calls take(event) for their messages (events.py).

    `watch` receives the ranks' progress.
    """

    def __init__(self, system: System, take: Callable[[Any], None], watch: Watch) -> None:
        self.watch = watch
        self._system, self._take = system, take
        self._connections: dict[socket.socket, int] = {}  # ranks; -1: not yet known, or no rank's
        self._pids: dict[int, int] = {}  # of the scripts' running processes, by rank
        self._local: dict[int, int] = {}  # local ranks
        self._stacks_requests: set[socket.socket] = set()
        self._request_again_at = -math.inf  # the coordinator has a request until then
        self._leaves = False
        self._ignored = 0
        self._counted = {**system.oom_kills(), **system.refused_processes()}
        self._listener: socket.socket | None = None

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from now on."""
        listener.setblocking(False)
        self._listener = listener
        act = functools.partial(self._accept, listener)
        self._system.selector.register(listener, selectors.EVENT_READ, act)

    @property
    def are_gone(self) -> bool:
        """Whether no keeper is connected."""
        return all(rank < 0 for rank in self._connections.values())

    def close(self) -> None:
        """Close all connections: connected keepers end their ranks, and leave."""
        for connection in filter(None, (self._listener, *self._connections)):
            with contextlib.suppress(KeyError, ValueError):  # closed already
                self._system.selector.unregister(connection)
            connection.close()
        self._connections.clear()

    # Commands.

    def run(self, ranks: Sequence[int], start: Callable[[int], Mapping[str, Any]]) -> None:
        """Command keepers to run scripts; start(rank) is the rest of the command."""
        for connection, rank in list(self._connections.items()):
            if rank in ranks:
                with contextlib.suppress(OSError):  # it was killed; the next read finds that
                    stderr = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _STDERR)
                    connection.sendmsg([encoded({"run": start(rank)})], [stderr])

    def end(self, action: events.EndRanks) -> None:
        """Command all keepers to end their ranks."""
        self._send_all({"end": action._asdict()})

    def ask(self, request: Mapping[str, Any], pids: Sequence[int] | None = None) -> None:
        """Forward a request to the processes of all scripts, or of some."""
        to = [rank for rank, pid in self._pids.items() if pids is None or pid in pids]
        self._send_all({"ask": request}, to)

    def leave(self, action: events.LeaveRanks) -> None:
        """Command keepers to leave."""
        self._leaves = True
        self._send_all({"leave": action.exit_code}, action.ranks)

    def _send_all(self, message: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        for connection, rank in self._connections.items():
            if rank >= 0 and (ranks is None or rank in ranks):
                with contextlib.suppress(OSError):  # it was killed; the next read finds that
                    send(connection, encoded(message))

    def reply_stacks(self, message: Mapping[str, Any]) -> None:
        """Reply to all who have requested the stacks."""
        self._request_again_at = -math.inf
        while self._stacks_requests:
            with contextlib.suppress(OSError):
                send(self._stacks_requests.pop(), encoded(message))

    # Connections.

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        files, used = self._system.open_files()
        if files - used < _LAST_FILES:
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection] = -1
        act = functools.partial(self._receive, connection, Lines(_LINE_LIMIT))
        self._system.selector.register(connection, selectors.EVENT_READ, act)

    def _receive(self, connection: socket.socket, lines: Lines) -> None:
        try:
            data = connection.recv(1 << 16)
            complete = lines.feed(data)
        except (OSError, ValueError):
            data, complete = b"", []
        for line in complete:
            if connection not in self._connections:
                return
            try:
                event = self._event_of(connection, line)
            except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
                self._ignored += 1
                if self._ignored <= _MOST_IGNORED:
                    self._system.log(f"ignoring an invalid message from a rank: {line[:200]!r}")
                continue
            if event is not None:
                self._take(event)
        if not data and connection in self._connections:
            self._disconnected(connection)

    def _disconnected(self, connection: socket.socket) -> None:
        self._system.selector.unregister(connection)
        rank = self._connections.pop(connection)
        connection.close()
        self._stacks_requests.discard(connection)
        if rank >= 0:
            self._hangs_up(rank)
            if not self._leaves:
                self._take(events.KeeperLost(rank, "its keeper"))

    def _hangs_up(self, rank: int) -> None:
        if rank in self._pids:
            self.watch.disconnected(self._pids[rank])

    # Messages.

    def _event_of(self, connection: socket.socket, line: bytes) -> Any:
        """Return the event of a line, if any; raise one of several errors if it is not valid."""
        rank = self._connections[connection]
        if line.startswith(b":") and rank >= 0:
            return self._said(rank, line[1:])
        message = decoded(line)
        if "want_stacks" in message:
            return self._stacks_requested(connection)
        if "hello" in message:
            return self._joined(connection, message["hello"])
        if rank < 0:
            raise ValueError(rank)
        if "runs" in message:
            pid = self._pids[rank] = int(message["runs"]["pid"])
            self.watch.started(pid, rank, self._local[rank], self._system.now())
            return events.RankRuns(rank, self._pids[rank])
        elif "ended" in message:
            return self._ended(rank, message["ended"])
        elif "cleared" in message:
            return events.KeeperCleared(rank, **message["cleared"])
        elif "lost" in message:
            return events.KeeperLost(rank, str(message["lost"]), is_gone=False)
        elif "hangs_up" in message:
            self._hangs_up(rank)
        else:
            self._system.log(printable(str(message["log"])))
        return None

    def _stacks_requested(self, connection: socket.socket) -> StacksRequest | None:
        self._stacks_requests.add(connection)
        if self._system.now() < self._request_again_at:
            return None
        self._request_again_at = self._system.now() + _STACKS_REPLY_SECONDS
        return StacksRequest()

    def _joined(self, connection: socket.socket, hello: Mapping[str, Any]) -> events.KeeperJoined:
        fields = {name: int(hello[name]) for name in events.KeeperJoined._fields}
        event = events.KeeperJoined(**fields)
        self._connections[connection] = event.rank
        self._local[event.rank] = event.local_rank
        return event

    def _said(self, rank: int, line: bytes) -> Any:
        """Return the event that a script's process reports, if any."""
        now, pid = self._system.now(), self._pids[rank]
        if not line.startswith(b"{"):  # faulthandler's
            self.watch.wrote(pid, line.decode("utf-8", "backslashreplace"))
            return None
        message = decoded(line)
        if "poll" in message:
            self.watch.replied(pid, message, now)
        elif "watch" in message:
            self.watch.connected(pid, int(message["watch"]), now)
        elif "script_ended" in message:
            self.watch.script_ended(pid, now)
            return events.ScriptEnded(rank, bool(message.get("alone")))
        elif "end" in message or "thread" in message:
            groups, message = message.get("groups"), message.get("end", message)
            links = read(wire.read(tuple[Link, ...], message["chain"]))
            end = self._end(int(message["exit_code"]), message)._replace(chain=links)
            if "thread" in message:
                return events.ThreadRaised(rank, str(message["thread"]), end) if links else None
            self.watch.failed(pid, groups)
            return events.RankExits(rank, end)
        return None

    def _ended(self, rank: int, message: Mapping[str, Any]) -> events.RankEnded:
        """Return how a script's process has ended."""
        code = int(message["code"])
        response = Disposition(message["response"]) if message["response"] else None
        end = self._end(code, message)._replace(words=str(message.get("words", "")))
        if code == -signal.SIGKILL:
            end = end._replace(recorded=end.recorded or "no out-of-memory kill was recorded")
        pid = self._pids.pop(rank, 0)
        if -code in CRASHES:
            calls = self.watch.crash(pid, -code)
            end = end._replace(place=place(calls), frames=frames_of(calls))
            end = end._replace(at=self._system.time_of_day())
        return events.RankEnded(rank, end, response)

    def _end(self, code: int, message: Mapping[str, Any]) -> Exit:
        """Return an end with what may explain it (clues.py), and the kernel's counts of that."""
        notes, counted = map(str, message.get("notes", ())), message.get("counted", ())
        recorded = self.oom() if code in _OF_A_KILL or "memory" in counted else ""
        if not recorded and "processes" in counted:
            recorded = risen(self._counted, self._system.refused_processes())
        return Exit(code, (), tuple(notes), recorded, str(message.get("broken", "")))

    def oom(self) -> str:
        """Return that an out-of-memory kill was recorded since the start, "" if none was."""
        return risen(self._counted, self._system.oom_kills())
