"""The connections between the launchers of a job: turns what happens there into events.

    with open_channel(cluster, port, start_timeout, fingerprint) as channel:
        state, actions = channel.begin()

        for event in channel.events():  # when a selector tells that there are some
            state, actions = agreement.step(state, event, time.monotonic())

agreement.py decides; `carry_out` does what it says.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import LaunchError
from launcher.job.cluster import Cluster
from launcher.peers import agreement
from launcher.peers.connection import Connection, reach
from launcher.peers.events import (
    Accept,
    Close,
    Closed,
    Connect,
    Connected,
    Fail,
    Full,
    Job,
    Listen,
    LookedUp,
    LookUp,
    Received,
    Send,
    SendAll,
    StopListening,
    Unreachable,
)
from launcher.protocol import encoded

if TYPE_CHECKING:
    from launcher.peers.addresses import LookUps  # which the first host alone needs
    from launcher.peers.listener import Listener


@contextlib.contextmanager
def open_channel(
    cluster: Cluster, port: int, start_timeout: int, fingerprint: Mapping[str, Any]
) -> Iterator[Channel]:
    """Open this host's end of the channel; `fingerprint` as in agreement.job_of."""
    who = (cluster.current_host, cluster.hosts, cluster.job_name)
    job = agreement.job_of(*who, port, start_timeout, fingerprint)
    channel = Channel(job._replace(addresses=cluster.addresses))
    try:
        yield channel
    finally:
        channel.close()


class Channel:
    """This host's connections, and where it listens, if it does."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._selector = selectors.EpollSelector()
        self._connections: dict[int, Connection] = {}
        self._numbers = 0
        self._listener: Listener | None = None
        self._look_ups: LookUps | None = None
        self._over = threading.Event()
        self._news: deque[Any] = deque()  # of threads and of actions; the bell rings for them
        self._bell, self._button = socket.socketpair()
        for end in (self._bell, self._button):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._events: list[Any] = []
        self._carry_out: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            SendAll: self._send_all,
            Close: self._close,
            Connect: self._connect,
            Listen: self._listen,
            StopListening: self._stop_listening,
            Accept: self._accept,
            LookUp: self._look_up,
        }

    def fileno(self) -> int:
        """Return what a selector waits for: an epoll, which another one can hold (epoll(7))."""
        return self._selector.fileno()

    def begin(self) -> tuple[agreement.State, tuple[Any, ...]]:
        """Return the state at the launcher's start, and the actions to carry out first."""
        return agreement.begin(self._job, time.monotonic())

    def events(self) -> list[Any]:
        """Return what has happened since; waits for nothing."""
        for key, _ in self._selector.select(0):
            key.data()
        events, self._events = self._events, []
        return events

    def carry_out(self, action: Any) -> None:
        """Carry out an action of the agreement.

        Raises LaunchError: the action is Fail, or no thread can be started.
        """
        if isinstance(action, Fail):
            raise LaunchError(action.text, exit_code=action.exit_code)
        self._carry_out[type(action)](action)

    def give_back_limit(self, pid: int) -> None:
        """Give a child the limit on open files that this process had before."""
        if self._listener:
            self._listener.give_back_limit(pid)

    def close(self) -> None:
        """Close all connections; what was sent before still arrives."""
        self._over.set()
        self._stop_listening()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        while self._news:  # threads may still add to it
            what = self._news.popleft()
            if isinstance(what, socket.socket):
                what.close()
        self._bell.close()
        self._button.close()
        self._selector.close()

    # What happens

    def _happened(self, what: Any) -> None:
        """Note an event, or a connection that this host has made; from any thread."""
        self._news.append(what)
        with contextlib.suppress(OSError):  # it has rung already, or the channel is closed
            self._button.send(b"\0")

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(1 << 12)
        while self._news:
            what = self._news.popleft()
            if not isinstance(what, socket.socket):
                self._events.append(what)
            elif not self._has_taken(what):
                self._events.append(Unreachable("it does not answer"))

    def _has_taken(self, connection: socket.socket) -> bool:
        """Make a connection one of this channel's, unless it is already closed."""
        try:
            taken = Connection(self._numbers, connection)
        except OSError:
            connection.close()
            return False
        self._numbers += 1
        self._connections[taken.number] = taken
        self._selector.register(taken, selectors.EVENT_READ, lambda: self._read(taken))
        self._events.append(Connected(taken.number, taken.address, taken.own_address))
        return True

    def _take(self, connection: socket.socket) -> None:
        """Take a connection that has come, unless it is already closed."""
        if self._has_taken(connection):
            self._read(self._connections[self._numbers - 1])  # its hello is mostly here, too

    def _read(self, connection: Connection) -> None:
        for message in connection.read():
            self._events.append(Received(connection.number, message))
        if connection.closed_by:
            self._events.append(Closed(connection.number, connection.closed_by))
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        del self._connections[connection.number]
        connection.close()

    # What is done

    def _send(self, action: Send) -> None:
        self._send_all(SendAll((action.conn,), action.message))

    def _send_all(self, action: SendAll) -> None:
        line = encoded(action.message)
        for conn in action.conns:
            if conn in self._connections:
                self._connections[conn].send(line)

    def _close(self, action: Close) -> None:
        if action.conn in self._connections:
            self._drop(self._connections[action.conn])

    # The first host

    def _listen(self, action: Listen) -> None:
        if self._listener is None:
            from launcher.peers.listener import Listener

            self._listener = Listener(
                *(self._job, self._selector, self._connections),
                *(self._take, lambda: self._events.append(Full())),
            )
        self._happened(self._listener.listen())
        if self._listener.shortage:
            self._happened(self._listener.shortage)

    def _stop_listening(self, action: StopListening | None = None) -> None:
        self._look_ups = None
        if self._listener:
            self._listener.close()

    def _accept(self, action: Accept) -> None:
        if self._listener:
            self._listener.resume()

    def _look_up(self, action: LookUp) -> None:
        if self._look_ups is None:
            from launcher.peers.addresses import LookUps

            self._look_ups = LookUps(self._job.address, self._on_answer)
        self._look_ups.ask(action.hosts)

    def _on_answer(self, host: str, resolves: bool) -> None:
        if self._look_ups:  # once all have joined it must not wake this host
            self._happened(LookedUp(host, resolves))

    # Every other host

    def _connect(self, action: Connect) -> None:
        reach(self._job, action.wait, self._over, self._happened)
