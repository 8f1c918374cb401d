"""The launcher's end of the connections to its keepers (keeper.py), and the events from there.

Keepers connect to a Unix socket in the job's folder; so does `sm-launch stacks`, which requests all
ranks' stacks. Messages of a script's process go to the watch or become events.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launcher.errors import Disposition
from launcher.host.cgroups import risen
from launcher.host.system import System
from launcher.result.causes import Exit, expanded
from launcher.run import events
from launcher.text import wire
from launcher.text.protocol import LineSocket, Lobby, decoded, encoded
from launcher.text.words import printable
from launcher.watch.host import Watch
from launcher.watch.stacks import CRASHES, crash_in, frames_of, place
from launcher.watch.waits import StacksRequest

_STDERR = struct.pack("i", 2)
# Exit codes of a killed process, or of one that passes on a killed child's: shells', sys.exit's.
_OF_A_KILL = (-signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGKILL & 0xFF)


class _Connection(LineSocket):
    """Of a rank's keeper, from its hello on, or of a user who wants stacks.

    A rank's longest line is shorter than the limit (rank.py).
    """

    rank = local_rank = -1
    pid = 0  # of the script's process, while it runs
    words = ""  # its last output until it said why it ends
    wants_stacks = False


class Keepers(Lobby[_Connection]):
    """All keepers of this host; calls take(event) for their messages (events.py).

    `watch` receives the ranks' progress.
    """

    def __init__(self, system: System, take: Callable[[Any], None], watch: Watch) -> None:
        self.watch = watch
        self._system, self._take = system, take
        super().__init__(system.selector, _Connection, self._receive, self._lost)
        self._counted = {**system.oom_kills(), **system.refused_processes()}

    @property
    def are_gone(self) -> bool:
        """Whether no keeper is connected."""
        return not self._keepers_of()

    def close(self) -> None:
        """Close all connections: connected keepers end their ranks, and leave."""
        for connection in self.connections:
            connection.close()
        super().close()

    # Commands.

    def run(self, ranks: Sequence[int], start: Callable[[int], Mapping[str, Any]]) -> None:
        """Command keepers to run scripts; start(rank) is the rest of the command."""
        stderr = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _STDERR)
        for keeper in self._keepers_of(ranks):
            with contextlib.suppress(OSError):  # it was killed; the next read finds that
                keeper.socket.sendmsg([encoded({"run": start(keeper.rank)})], [stderr])

    def end(self, action: events.EndRanks) -> None:
        """Command all keepers to end their ranks."""
        self._send({"end": action._asdict()}, self._keepers_of())

    def ask(self, request: Mapping[str, Any], pids: Sequence[int] | None = None) -> None:
        """Forward a request to the processes of all scripts, or of some."""
        running = [one for one in self._keepers_of() if one.pid]
        self._send({"ask": request}, [one for one in running if pids is None or one.pid in pids])

    def leave(self, exit_code: int, ranks: Sequence[int] | None = None) -> None:
        """Command all keepers to leave, or those of some ranks."""
        self._send({"leave": exit_code}, self._keepers_of(ranks))

    def reply_stacks(self, message: Mapping[str, Any]) -> None:
        """Reply to all who have requested the stacks."""
        to = [one for one in self.connections if one.wants_stacks]
        self._send(message, to)
        for connection in to:
            connection.wants_stacks, connection.is_stranger = False, True

    def _keepers_of(self, ranks: Sequence[int] | None = None) -> list[_Connection]:
        keepers = [one for one in self.connections if one.rank >= 0]
        return [one for one in keepers if ranks is None or one.rank in ranks]

    def _send(self, message: Mapping[str, Any], to: Iterable[_Connection]) -> None:
        for connection in to:
            connection.send(encoded(message))

    # Connections.

    def _receive(self, connection: _Connection, line: bytes) -> None:
        try:
            event = self._event_of(connection, line)
        except ValueError:  # another error is a mistake of ours
            self._system.log(f"ignoring an invalid message from a rank: {line[:200]!r}")
            return
        if event is not None:
            self._take(event)

    def _lost(self, connection: _Connection, _: Exception) -> None:
        connection.close()
        if connection.rank >= 0:
            self.watch.disconnected(connection.pid)
            self._take(events.KeeperLost(connection.rank))

    # Messages.

    def _event_of(self, connection: _Connection, line: bytes) -> Any:
        """Return the event of a line, if any. Raises ValueError, without effect, if it is bad."""
        rank = connection.rank
        if line.startswith(b":") and rank >= 0:
            return self._said(connection, line[1:])
        message = decoded(line)
        if "want_stacks" in message:
            has_asked, connection.wants_stacks = connection.wants_stacks, True
            connection.is_stranger = False
            return None if has_asked else StacksRequest()  # the coordinator takes several for one
        if "hello" in message:
            event = wire.read(events.KeeperJoined, message["hello"])
            if self._keepers_of([event.rank]):  # a rank has one keeper
                raise ValueError(event)
            connection.rank, connection.local_rank = event.rank, event.local_rank
            connection.is_stranger = False
            return event
        if rank < 0:
            raise ValueError(rank)
        if "runs" in message:
            runs: events.RankRuns = _event(events.RankRuns, rank, message["runs"])
            connection.pid, now = runs.pid, self._system.now()
            self.watch.started(connection.pid, rank, connection.local_rank, now)
            return runs
        elif "ended" in message:
            return self._rank_ended(connection, message["ended"])
        elif "cleared" in message:
            return _event(events.KeeperCleared, rank, message["cleared"])
        elif "stub" in message:
            return _event(events.StubSignalled, rank, message["stub"])
        elif "words" in message:
            connection.words = wire.read(str, message["words"])
        elif "hangs_up" in message:
            self.watch.disconnected(connection.pid)
        else:
            self._system.log(printable(wire.read(str, message.get("log"))))
        return None

    def _said(self, connection: _Connection, line: bytes) -> Any:
        """Return the event that a script's process reports, if any."""
        now, rank, pid = self._system.now(), connection.rank, connection.pid
        if not line.startswith(b"{"):  # faulthandler's
            self.watch.wrote(pid, line.decode("utf-8", "backslashreplace"))
            return None
        event: Any = None
        message = decoded(line)
        if "poll" in message:
            self.watch.replied(pid, message, now)
        elif "watch" in message:
            self.watch.connected(pid, wire.read(int, message["watch"]), now)
        elif "script_ended" in message:
            event = _event(events.ScriptEnded, rank, message["script_ended"])
            self.watch.script_ended(pid, now)
        elif "thread" in message:
            thread = wire.read(dict, message["thread"])
            end = self._exit_of(thread.get("end"))
            return events.ThreadRaised(rank, str(thread.get("name")), end) if end.chain else None
        elif "end" in message:
            event = events.RankExits(rank, self._exit_of(message["end"], connection.words))
            self.watch.failed(pid, message.get("groups"))
        return event

    def _rank_ended(self, connection: _Connection, message: Mapping[str, Any]) -> events.RankEnded:
        """Return how a script's process has ended."""
        pid, end = connection.pid, self._exit_of(message)
        end = end._replace(words=str(message.get("words", "")))
        response = Disposition(message["response"]) if message.get("response") else None
        if end.exit_code == -signal.SIGKILL:
            end = end._replace(recorded=end.recorded or "no out-of-memory kill was recorded")
        connection.pid, number = 0, -end.exit_code
        if number in CRASHES:
            calls = self.watch.crash(pid, number) or crash_in(str(message.get("crash", "")), number)
            end = end._replace(place=place(calls), frames=frames_of(calls))
            end = end._replace(at=self._system.time_of_day())
        return events.RankEnded(connection.rank, end, response)

    def _exit_of(self, message: Any, words: str = "") -> Exit:
        """Return an end with the kernel's counts of what may explain it.

        A rank sets only the fields that are passed on here; its keeper and the launcher set the
        others.
        """
        end: Exit = wire.read(Exit, wire.read(dict, message))
        counted = wire.read(tuple[str, ...], message.get("counted", []))
        recorded = self.oom() if end.exit_code in _OF_A_KILL or "memory" in counted else ""
        if not recorded and "processes" in counted:
            recorded = risen(self._counted, self._system.refused_processes())
        return Exit(end.exit_code, expanded(end.chain), end.facts, recorded, end.broken, words)

    def oom(self) -> str:
        """Return that an out-of-memory kill was recorded since the start, "" if none was."""
        return risen(self._counted, self._system.oom_kills())


def _event(kind: type, rank: int, fields: Any) -> Any:
    """Return a rank's event. Raises ValueError if its fields are not valid."""
    return wire.read(kind, {**wire.read(dict, fields), "rank": rank})
