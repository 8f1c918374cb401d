"""The launchers of one job talk: they start together, end together, and give one reason.

Each host's launcher keeps one TCP connection to that of the first host (`--launcher-peer-port`),
which decides for all. What is said is lines of JSON, each at most 64 KiB, in this order:

    a host                                        the first host
    {"hello": {"job", "host", "hosts", "alike"}}
                                                  {"welcome": true}   counted; wait for the others
                                                  {"refused": why}    not of this job; hangs up
                                                  {"missing": [...]}  who is not here, every 30 s
                                                  {"go": true}        all are here: start torchrun
    {"case": {...}}    what failed here
    {"stop": 15}       a person or SageMaker stops this host
    {"done": true}     all ranks of this host succeeded
                                                  {"verdict": {...}}  how all hosts end, and why

A host that cannot start says its case right behind its hello. `alike` is what has to agree between
hosts; a difference is a verdict, too. A connection that ends before the verdict is a lost host, and
so is one whose other end answers no packet for 14 s (TCP keep-alive, tcp(7)): nothing is sent while
a job runs. A connection that breaks a rule is closed, and changes nothing for the others. The
channel is not authenticated: it is meant for the job's own network.

Which case becomes the verdict: a rank that failed for a reason of its own, before a host that was
lost, before a torchrun that failed, before a rank that only heard of another's death. The first
host waits a moment for a better one than it has.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.cluster import Cluster
from launcher.errors import EXIT_HOST_LOST, EXIT_USAGE, LaunchError, log, short
from launcher.options import flag
from launcher.signals import Signals

_LINE_LIMIT = 1 << 16
_TEXT_LIMIT = 1 << 12  # of what goes into a line, so that it stays within its own
# All in seconds.
_TO_GREET = 4  # to say hello, and to be welcomed
_TO_TELL = 3  # for a host that cannot start, to tell the others
_ROLL_EVERY = 30  # between two lines on who is missing
_RETRY = 0.02  # between two tries to reach the first host,
_NAME_RETRY = 0.5  # and where its name does not resolve
_LISTEN_RETRY = 1  # between two tries of the first host to listen
# Kinds of cases, the better first, and how long each waits for a better one.
OWN, LOST, BROKEN, ECHO = range(4)
_PATIENCE = (0.3, 0.5, 1.0, 1.5)


class Verdict(NamedTuple):
    """How all hosts end: `text` is that of the failure file, "" if there is none to write."""

    exit_code: int
    text: str = ""
    stop_signal: int = 0


def join(cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]) -> Peers:
    """Open this host's end of the channel.

    `alike` maps what has to agree between hosts, in words for a message, to its values here.
    Use it in a `with` statement, and call `roll_call` next.
    Raises LaunchError where the first host cannot listen (exit code 2).
    """
    kind = FirstHost if cluster.node_rank == 0 else OtherHost
    return kind(cluster, port, start_timeout, alike)


def tell_mistake(cluster: Cluster, port: int, error: LaunchError, signals: Signals) -> LaunchError:
    """Tell the other hosts of a mistake on this one, as `Peers.tell` does.

    Raises LaunchError where the first host cannot listen, or refuses this one.
    """
    with join(cluster, port, 2 * _TO_TELL, {}) as channel:
        return channel.tell(error, signals)


class Peers:
    """One launcher's end of the channel. A selector can wait for it; then `act` is due.

    Attributes: `go`, all hosts are here; `verdict`, how the job ends, once that is known;
    `store_is_lost`, the first host is lost, and torchrun's store with it.
    """

    def __init__(
        self, cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]
    ) -> None:
        self.go = False
        self.verdict: Verdict | None = None
        self.store_is_lost = False
        self._me = cluster.current_host
        self._hosts = cluster.hosts
        self._first = cluster.hosts[0]
        self._port = port
        self._start_timeout = start_timeout
        self._started = time.monotonic()
        self._roll_at = self._started + _ROLL_EVERY
        self._job = cluster.job_name
        self._alike = {what: _bounded(value) for what, value in alike.items()}
        self._selector = selectors.EpollSelector()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return what a selector waits for: an epoll, which another one can hold (epoll(7))."""
        return self._selector.fileno()

    def timeout(self) -> float | None:
        """Return in how many seconds `act` is due though nothing may happen; None: never."""
        due = min(self._times(), default=math.inf)
        return None if math.isinf(due) else max(0.0, due - time.monotonic())

    def act(self) -> None:
        """Do what is due; waits for nothing."""
        for key, _ in self._selector.select(0):
            key.data()
        self._tick(time.monotonic())

    def roll_call(self, signals: Signals) -> None:
        """Wait until all hosts are here (`go`), or it is clear that they will not be (`verdict`).

        Raises LaunchError where the first host cannot listen on its port for 3 s, its launcher
        refuses this host, or something else answers in its place.
        """
        while not self.go and self.verdict is None:
            self._wait(signals, self.timeout())

    def tell(self, error: LaunchError, signals: Signals) -> LaunchError:
        """Tell the other hosts, for at most 3 s, of a mistake on this one, so that they end, too.

        Returns what all hosts are to end with.
        """
        self.case(OWN, error.exit_code, f"launcher: {self._me}: {error}\n")
        until = time.monotonic() + _TO_TELL
        while not self._all_know() and time.monotonic() < until:
            left = max(0.0, until - time.monotonic())
            due = self.timeout()
            self._wait(signals, left if due is None else min(due, left))
        if self.verdict and self.verdict.text:
            text = self.verdict.text.removeprefix("launcher: ").rstrip()
            return LaunchError(text, exit_code=self.verdict.exit_code)
        return LaunchError(f"{self._me}: {error}", exit_code=error.exit_code)

    def _wait(self, signals: Signals, timeout: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(signals, selectors.EVENT_READ)
            selector.select(timeout)
        for number in signals.take():
            if number != signal.SIGCHLD:
                self.stop(number)
        self.act()

    def _all_know(self) -> bool:
        """Tell whether every host that can be told has been told the verdict."""
        return self.verdict is not None

    # What this host says

    def case(self, kind: int, exit_code: int, text: str) -> None:
        """Say that this host failed, so that the job does; text as in the failure file."""
        self._say({"case": {"kind": kind, "exit_code": exit_code, "text": text[:_TEXT_LIMIT]}})

    def stop(self, number: int) -> None:
        """Say that this host was told to stop: all are to."""
        self._say({"stop": number})

    def done(self) -> None:
        """Say that all ranks of this host have succeeded."""
        self._say({"done": True})

    def _say(self, message: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _times(self) -> list[float]:
        """Return when `_tick` is due, on the clock time.monotonic()."""
        return [] if self.go or self.verdict else [self._roll_at, self._start_deadline]

    def _tick(self, now: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Hang up. What was said before still arrives."""
        self._selector.close()

    @property
    def _start_deadline(self) -> float:
        return self._started + self._start_timeout

    def _lost(self, host: str, how: str) -> Verdict:
        seconds = time.monotonic() - self._started
        details = f"exit code {EXIT_HOST_LOST}, {seconds:.0f} s after start"
        return Verdict(EXIT_HOST_LOST, f"{host} {how}\n{details}\n")


class FirstHost(Peers):
    """The end that listens, and decides."""

    def __init__(
        self, cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]
    ) -> None:
        super().__init__(cluster, port, start_timeout, alike)
        self._wires: dict[str, _Wire] = {}  # of the hosts that are welcome
        self._strangers: dict[_Wire, float] = {}  # who have not said hello, and until when
        self._greeted: set[str] = set()
        self._done: set[str] = set()
        self._cases: list[tuple[int, Verdict]] = []
        self._decide_at = math.inf
        self._listener: socket.socket | None = None
        self._listen_at = 0.0
        self._listen()

    def _listen(self) -> None:
        """Listen on this host's own address; again in a second where that may yet work."""
        now = time.monotonic()
        self._listen_at = now + _LISTEN_RETRY
        try:
            address = socket.gethostbyname(self._me)
        except (OSError, UnicodeError):
            return  # a name may take its time to get an address
        try:
            self._listener = socket.create_server((address, self._port), backlog=128)
        except OSError as error:
            # The others are to meet whoever listens there, before this host is gone.
            if error.errno == errno.EADDRINUSE and now < self._started + _TO_TELL:
                return
            raise LaunchError(
                f"{self._me} cannot listen on port {self._port} for the launchers of the other "
                f"hosts ({os.strerror(error.errno or 0)}); choose another with "
                f"{flag('peer_port')}, on every host alike."
            ) from None
        self._listen_at = math.inf
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _say(self, message: Mapping[str, Any]) -> None:
        self._hear(self._me, message)

    def _accept(self) -> None:
        assert self._listener
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                wire = _Wire(connection, self._selector, self._on_wire)
                self._strangers[wire] = time.monotonic() + _TO_GREET

    def _on_wire(self, wire: _Wire) -> None:
        for message in wire.read():
            if wire.host:
                self._hear(wire.host, message)
            else:
                self._greet(wire, message)
        if wire.closed_by and wire.host:
            host, wire.host = wire.host, ""
            del self._wires[host]
            if self.verdict is None:
                self._consider(LOST, self._lost(host, f"was lost: {wire.closed_by}"))
        elif wire.closed_by:
            self._strangers.pop(wire, None)

    def _greet(self, wire: _Wire, message: Mapping[str, Any]) -> None:
        """Take a hello; whoever says anything else is none of ours."""
        hello = message.get("hello")
        if not isinstance(hello, dict):
            wire.close("said no hello")
            return
        host = str(hello.get("host"))
        why = ""
        if hello.get("job") != self._job:
            why = f"this is job {self._job}, not {short(hello.get('job'), 60)}"
        elif host not in self._hosts or host == self._me:
            why = f"{short(host, 60)} is no other host of this job ({', '.join(self._hosts)})"
        elif host in self._wires:
            why = f"{host} is here already"
        if why:
            log(f"refused a connection to port {self._port}: {why}.")
            wire.say({"refused": why})
            wire.close("refused")
            return
        del self._strangers[wire]
        wire.host = host
        self._wires[host] = wire
        self._greeted.add(host)
        wire.say({"welcome": True})
        if self.verdict:
            wire.say({"verdict": self.verdict._asdict()})
            return
        self._compare(host, hello)
        if len(self._wires) == len(self._hosts) - 1 and not self._cases and not self.verdict:
            self.go = True
            self._tell_all({"go": True})

    def _compare(self, host: str, hello: Mapping[str, Any]) -> None:
        """Make a verdict of what differs between that host and this one."""
        theirs = hello.get("alike")
        if not isinstance(theirs, dict) or not theirs or not self._alike:
            return  # one of the two cannot start, and has said so or is about to
        theirs = {"list of hosts": hello.get("hosts"), **theirs}
        ours = {"list of hosts": list(self._hosts), **self._alike}
        for what, value in ours.items():
            if theirs.get(what) != value:
                text = (
                    f"launcher: {self._me} and {host} differ in their {what}: {short(value)} and "
                    f"{short(theirs.get(what))}; expected the same on every host."
                )
                self._decide(Verdict(EXIT_USAGE, text + "\n"))
                return

    def _hear(self, host: str, message: Mapping[str, Any]) -> None:
        """Act on what a host says; nonsense from a host of ours is as good as silence."""
        if self.verdict:
            return
        with contextlib.suppress(LookupError, TypeError, ValueError):
            if "case" in message:
                case = message["case"]
                verdict = Verdict(int(case["exit_code"]), str(case["text"]))
                self._consider(range(4)[case["kind"]], verdict)
            elif "stop" in message:
                number = range(65)[message["stop"]]
                self._decide(Verdict(128 + number, "", number))
            elif "done" in message:
                self._done.add(host)
                if len(self._done) == len(self._hosts):
                    self._decide(Verdict(0))

    def _consider(self, kind: int, verdict: Verdict) -> None:
        self._cases.append((kind, verdict))
        self._decide_at = min(self._decide_at, time.monotonic() + _PATIENCE[kind])

    def _decide(self, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self._tell_all({"verdict": verdict._asdict()})

    def _all_know(self) -> bool:
        return self.verdict is not None and len(self._greeted) == len(self._hosts) - 1

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for wire in list(self._wires.values()):
            wire.say(message)

    def _times(self) -> list[float]:
        undecided = [] if self.verdict else [self._decide_at, self._listen_at]
        return [*super()._times(), *self._strangers.values(), *undecided]

    def _tick(self, now: float) -> None:
        for wire, until in list(self._strangers.items()):
            if now >= until:
                wire.close("said nothing")
                del self._strangers[wire]
        if self.verdict:
            return
        if now >= self._listen_at:
            self._listen()
        if now >= self._decide_at:
            self._decide(min(self._cases, key=lambda case: case[0])[1])
        elif not self.go:
            missing = [host for host in self._hosts[1:] if host not in self._wires]
            if not self._listener:
                missing = [self._me]  # it has no address for the others to come to
            if now >= self._start_deadline:
                names = ", ".join(f"{host} ({_resolves(host)})" for host in missing)
                self._decide(self._lost(names, f"did not arrive within {self._start_timeout} s"))
            elif now >= self._roll_at:
                self._roll_at = now + _ROLL_EVERY
                self._tell_all({"missing": missing})
                _log_missing(missing)

    def close(self) -> None:
        for wire in [*self._wires.values(), *self._strangers]:
            wire.close("the job has ended")
        if self._listener:
            self._listener.close()
        super().close()


class OtherHost(Peers):
    """The end of every other host."""

    def __init__(
        self, cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]
    ) -> None:
        super().__init__(cluster, port, start_timeout, alike)
        self._wire: _Wire | None = None
        self._welcome = False
        self._to_say: list[Mapping[str, Any]] = []
        self._greet_by = math.inf
        self._trouble = "it did not answer"
        self._over = threading.Event()
        self._connected: list[socket.socket] = []
        self._bell, bell = socket.socketpair()  # rung by the thread when it is through
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_connected)
        threading.Thread(target=self._connect, args=(bell,), daemon=True).start()

    def _connect(self, bell: socket.socket) -> None:
        """In a thread, since looking up a name can take seconds: reach the first host."""
        with bell:
            while not self._over.is_set():
                try:
                    address = (self._first, self._port)
                    own = (self._me, 0)
                    self._connected.append(socket.create_connection(address, _TO_GREET, own))
                    return
                except (OSError, UnicodeError) as error:
                    self._trouble = str(error)
                    nameless = isinstance(error, (socket.gaierror, UnicodeError))
                    self._over.wait(_NAME_RETRY if nameless else _RETRY)

    def _on_connected(self) -> None:
        self._selector.unregister(self._bell)
        self._bell.close()
        if not self._connected:
            return  # it gave up when told to
        self._wire = _Wire(self._connected.pop(), self._selector, self._on_wire)
        self._wire.host = self._first
        self._greet_by = time.monotonic() + _TO_GREET
        hello = {"job": self._job, "host": self._me, "hosts": self._hosts, "alike": self._alike}
        self._wire.say({"hello": hello})
        for message in self._to_say:
            self._wire.say(message)

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._wire:
            self._wire.say(message)
        else:
            self._to_say.append(message)
            if "stop" in message:
                self.verdict = Verdict(128 + message["stop"], "", message["stop"])

    def _on_wire(self, wire: _Wire) -> None:
        for message in wire.read():
            with contextlib.suppress(TypeError, ValueError):
                self._heed(message)
        if wire.closed_by and self.verdict is None:
            if not self._welcome:
                raise self._no_launcher()
            self.verdict = self._lost(self._first, f"was lost: {wire.closed_by}")
            self.store_is_lost = True

    def _heed(self, message: Mapping[str, Any]) -> None:
        if "welcome" in message:
            self._welcome = True
            self._greet_by = math.inf
        elif "refused" in message:
            raise LaunchError(
                f"the launcher of {self._first} refused {self._me}: {message['refused']}."
            )
        elif "missing" in message:
            _log_missing([host for host in self._hosts if host in message["missing"]])
        elif "go" in message and self._welcome:
            self.go = True
        elif "verdict" in message and self.verdict is None:
            self.verdict = Verdict(**message["verdict"])

    def _no_launcher(self) -> LaunchError:
        return LaunchError(
            f"what answers on port {self._port} of {self._first} is not this job's launcher; "
            f"choose another with {flag('peer_port')}, on every host alike.",
            exit_code=EXIT_HOST_LOST,
        )

    def _times(self) -> list[float]:
        """Once welcome, the first host is the one to lose patience."""
        return [] if self.verdict or self._welcome else [*super()._times(), self._greet_by]

    def _tick(self, now: float) -> None:
        if self.verdict or self._welcome:
            return
        if now >= self._greet_by:
            raise self._no_launcher()
        if now >= self._start_deadline:
            how = f"did not arrive within {self._start_timeout} s ({self._trouble})"
            self.verdict = self._lost(self._first, how)
        elif now >= self._roll_at:
            self._roll_at = now + _ROLL_EVERY
            log(f"waiting for {self._first} ({self._trouble}).")

    def close(self) -> None:
        self._over.set()
        if self._wire:
            self._wire.close("the job has ended")
        super().close()


class _Wire:
    """One connection: lines of JSON in and out. Nothing is waited for.

    Attributes: `host`, whose it is ("" if unknown); `closed_by`, why it is closed ("": it is not).
    """

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        on_data: Any,
    ) -> None:
        self.host = ""
        self.closed_by = ""
        self._socket = connection
        self._selector = selector
        self._rest = b""
        connection.setblocking(False)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 3),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, 14_000),  # ms, for what was sent and not acknowledged
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        selector.register(connection, selectors.EVENT_READ, lambda: on_data(self))

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message: small ones, few enough that the kernel takes each whole."""
        if self.closed_by:
            return
        with contextlib.suppress(OSError):  # read() will tell
            self._socket.send(json.dumps(message).encode() + b"\n")

    def read(self) -> Sequence[Mapping[str, Any]]:
        """Return the messages that have come; closes the connection where that ends it."""
        try:
            data = self._socket.recv(_LINE_LIMIT)
        except BlockingIOError:
            return []
        except OSError as error:
            self.close(f"it stopped answering ({error.strerror})")
            return []
        if not data:
            self.close("its launcher ended without a word")
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if len(self._rest) > _LINE_LIMIT or not all(isinstance(m, dict) for m in messages):
            self.close("it said what no launcher says")
            return []
        return messages

    def close(self, why: str) -> None:
        if not self.closed_by:
            self.closed_by = why
            self._selector.unregister(self._socket)
            self._socket.close()


def _bounded(value: Any) -> Any:
    """Return a value to compare, or what tells it from others where it is long."""
    text = json.dumps(value)
    if len(text) <= _TEXT_LIMIT:
        return value
    import hashlib  # 3 ms that short values need not cost

    return f"{text[:40]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def _resolves(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return "its name does not resolve"
    return "its name resolves"


def _log_missing(hosts: Sequence[str]) -> None:
    """Log who is missing; in a thread, since looking up a name can take seconds."""

    def look_up() -> None:
        log(f"waiting for {', '.join(f'{host} ({_resolves(host)})' for host in hosts)}.")

    threading.Thread(target=look_up, daemon=True).start()
