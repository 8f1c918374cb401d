"""The end of the channel of every host but the first (peers.py)."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Mapping
from selectors import EVENT_READ
from typing import Any

from launcher.errors import EXIT_HOST_LOST, LaunchError, log
from launcher.job.cluster import Cluster
from launcher.job.options import flag
from launcher.peers import addresses
from launcher.peers.channel import ROLL_EVERY, TO_GREET, Peers
from launcher.peers.connection import Wire
from launcher.peers.messages import missing_in, reason_in, verdict_in
from launcher.result.failure import Verdict

# All in seconds.
_TO_ANSWER = 10  # for the first host to welcome, or refuse
_RETRY = 0.02  # between two tries to reach the first host: at first,
_RETRY_MOST = 1  # and after a while


class OtherHost(Peers):
    """The end of every other host."""

    def __init__(
        self, cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]
    ) -> None:
        super().__init__(cluster, port, start_timeout, alike)
        self._wire: Wire | None = None
        self._welcome = False
        self._done = False
        self._to_say: list[Mapping[str, Any]] = []  # until this host is welcome
        self._answer_by = math.inf
        self._trouble = "no answer from DNS to its name"
        self._over = threading.Event()
        self._connected: list[socket.socket] = []
        self._bell: socket.socket | None = None
        self._reach(0)

    def _reach(self, wait: float) -> None:
        """Connect to the first host in a thread, since looking up a name can take seconds."""
        # Rung by the thread when it is through.
        self._bell, bell = socket.socketpair()
        self._selector.register(self._bell, EVENT_READ, self._on_connected)
        thread = threading.Thread(target=self._connect, args=(bell, wait), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # ulimit -u, or the cgroup's pids.max
            raise LaunchError(f"cannot start a thread ({error}); raise ulimit -u.") from None

    def _connect(self, bell: socket.socket, wait: float) -> None:
        with bell:
            while not self._over.wait(wait):
                found = addresses.look_up(self._first, self._port)
                if not found:
                    self._trouble = f"the name {self._first} does not resolve"
                for family, address in found:
                    try:
                        self._connected.append(_connected(family, address))
                        return
                    except OSError as error:
                        refused = isinstance(error, ConnectionRefusedError)
                        self._trouble = "nothing listens there" if refused else "it does not answer"
                waited = time.monotonic() - self._started
                wait = min(_RETRY_MOST, max(_RETRY, waited / 8))

    def _hush(self) -> None:
        if self._bell:
            self._selector.unregister(self._bell)
            self._bell.close()
            self._bell = None

    def _on_connected(self) -> None:
        self._hush()
        if not self._connected:  # what the thread did not expect has ended it
            self._reach(_RETRY_MOST)
            return
        connection = self._connected.pop()
        try:
            self._wire = Wire(connection, self._selector, self._on_wire)
        except OSError:
            connection.close()
            self._reach(_RETRY_MOST)
            return
        self._wire.host = self._first
        self._answer_by = time.monotonic() + _TO_ANSWER
        self._wire.say({"hello": {"job": self._job, "host": self._me, "alike": self._alike}})
        for message in self._to_say:
            self._wire.say(message)

    def _say(self, message: Mapping[str, Any]) -> None:
        self._done = self._done or "done" in message
        if self._wire:
            self._wire.say(message)
        if not self._welcome:
            self._to_say.append(message)
            if "stop" in message and self.verdict is None:
                self.verdict = Verdict(128 + message["stop"], "", message["stop"])

    def _all_know(self) -> bool:
        return self.verdict is not None and not self._to_say

    def _on_wire(self, wire: Wire) -> None:
        for message in wire.read():
            # Messages that are not valid are ignored.
            with contextlib.suppress(ValueError):
                self._heed(wire, message)
            if wire is not self._wire:
                return  # it is to come back later
        if wire.closed_by and self.verdict is None:
            if not self._welcome:
                raise self._no_launcher()
            self.verdict = self._lost(self._first, f"was lost: {wire.closed_by}")
            self.store_is_lost = True

    def _heed(self, wire: Wire, message: Mapping[str, Any]) -> None:
        if "welcome" in message:
            self._welcome = True
            self._to_say.clear()
            self.own_address = wire.own_address
        elif "refused" in message and not self._welcome:
            reason = reason_in(message["refused"])
            raise LaunchError(f"the launcher of {self._first} refused {self._me}: {reason}.")
        elif "later" in message and not self._welcome:
            wire.close("it has no room yet")
            self._wire, self._answer_by = None, math.inf
            self._trouble = "it has no room for more connections"
            self._reach(_RETRY_MOST)
        elif "missing" in message:
            log(f"waiting for {missing_in(message, self._hosts)}.")
        elif "go" in message and self._welcome:
            self.go = True
        elif "verdict" in message and self.verdict is None:
            self.verdict = verdict_in(message["verdict"], done=self._done)

    def _no_launcher(self) -> LaunchError:
        return LaunchError(
            f"what answers on port {self._port} of {self._first} is not this job's launcher; "
            f"choose another with {flag('peer_port')}, on every host alike.",
            exit_code=EXIT_HOST_LOST,
        )

    def _times(self) -> list[float]:
        """Once welcome, the first host is the one to lose patience."""
        return [] if self.verdict or self._welcome else [*super()._times(), self._answer_by]

    def _tick(self, now: float) -> None:
        if self.verdict or self._welcome:
            return
        if now >= self._answer_by:
            raise self._no_launcher()
        if now >= self._start_deadline:
            how = f"did not arrive within {self._start_timeout} s ({self._trouble})"
            self.verdict = self._lost(self._first, how)
        elif now >= self._roll_at:
            self._roll_at = now + ROLL_EVERY
            log(f"waiting for {self._first} ({self._trouble}).")

    def close(self) -> None:
        self._over.set()
        self._hush()
        if self._wire:
            self._wire.close("the job has ended")
        super().close()


def _connected(family: socket.AddressFamily, address: addresses.SocketAddress) -> socket.socket:
    """Return a connection to an address. Raises OSError."""
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(TO_GREET)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
