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

`alike` is what has to agree between hosts; a difference is a verdict, too. A host that cannot start
has none, and says its case right behind its hello. A connection that ends before the verdict is a
lost host, and so is one whose other end answers no packet for 14 s (TCP keep-alive, tcp(7)):
nothing is sent while a job runs. From `go` on nobody else can connect; before, a connection that
breaks a rule is closed, and changes nothing for the others. The channel is not authenticated: it is
meant for the job's own network.

Which case becomes the verdict: a rank that failed for a reason of its own, before a host that was
lost, before a torchrun that failed, before a rank that torchrun restarted a moment ago, before a
rank that only heard of another's death. The first host waits a moment for a better one than it has.
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
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from launcher.cluster import Cluster
from launcher.errors import EXIT_HOST_LOST, EXIT_USAGE, LaunchError, log, short
from launcher.failure import ECHO_PATIENCE, LOST, OWN, RESTARTED, Verdict
from launcher.options import flag
from launcher.signals import Signals
from launcher.wire import Wire

_TEXT_LIMIT = 1 << 12  # characters of what goes into a message, so that it stays within its line
_STRANGERS = 64  # connections at once that have not said who they are
# All in seconds.
_TO_GREET = 4  # for a connection to say hello
_TO_ANSWER = 10  # for the first host to welcome, or refuse
_TO_TELL = 3  # for a host that leaves before the start, to tell the others
_ROLL_EVERY = 30  # between two lines on who is missing
_RETRY = 0.02  # between two tries to reach the first host,
_NAME_RETRY = 0.5  # and where its name does not resolve
_LISTEN_RETRY = 1  # between two tries of the first host to listen
_TO_LOOK_UP = 2  # for names, when there is no more time
_PATIENCE = (0.3, 0.5, 1.0, math.inf, ECHO_PATIENCE)  # of each kind of case, for a better one
_RECENT = 5  # how long a restart may be the cause of an echo


class _Case(NamedTuple):
    kind: int
    time: float
    verdict: Verdict


def join(cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]) -> Peers:
    """Open this host's end of the channel.

    `alike` maps what has to agree between hosts, in words for a message, to its values here; it
    is empty where this host cannot start. Use it in a `with` statement, and call `roll_call` next.
    Raises LaunchError where the first host cannot listen (exit code 2).
    """
    kind = FirstHost if cluster.node_rank == 0 else OtherHost
    return kind(cluster, port, start_timeout, alike)


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

    def leave(self, signals: Signals) -> None:
        """Before the start: let the other hosts hear of the verdict, for at most 3 s.

        Raises what roll_call does.
        """
        until = time.monotonic() + _TO_TELL
        while not self._all_know() and time.monotonic() < until:
            left = max(0.0, until - time.monotonic())
            due = self.timeout()
            self._wait(signals, left if due is None else min(due, left))

    def _wait(self, signals: Signals, timeout: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(signals, selectors.EVENT_READ)
            selector.select(timeout)
        for number in signals.take():
            if number != signal.SIGCHLD:
                self.stop(number)
        self.act()

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

    def _all_know(self) -> bool:
        """Tell whether every host knows the verdict."""
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
        """Return the verdict on a host that is lost, in the same words whoever has to find it."""
        return Verdict(EXIT_HOST_LOST, f"{host} {how}\nexit code {EXIT_HOST_LOST}\n")


class FirstHost(Peers):
    """The end that listens, and decides."""

    def __init__(
        self, cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]
    ) -> None:
        super().__init__(cluster, port, start_timeout, alike)
        self._wires: dict[str, Wire] = {}  # of the hosts that are welcome
        self._strangers: dict[Wire, float] = {}  # who have not said hello, and until when
        self._greeted: set[str] = set()
        self._all_can = bool(alike)  # start, as far as they have said
        self._done: set[str] = set()
        self._cases: list[_Case] = []
        self._decide_at = math.inf
        self._listener: socket.socket | None = None
        self._listen_at = 0.0
        self._own = _LookUp([self._me])
        self._own.join(0.2)  # seldom any longer
        self._missing: _LookUp | None = None  # of those who have not come in time
        self._last_call = math.inf
        self._listen()

    def _listen(self) -> None:
        """Listen on this host's own address; again in a second where that may yet work."""
        now = time.monotonic()
        if self._own.is_alive():
            self._listen_at = now + _RETRY
            return
        self._listen_at = now + _LISTEN_RETRY
        address = self._own.addresses[self._me]
        if not address:
            self._own = _LookUp([self._me])  # a name may take its time to get an address
            return
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
                wire = Wire(connection, self._selector, self._on_wire)
                self._strangers[wire] = time.monotonic() + _TO_GREET
                if len(self._strangers) > _STRANGERS:
                    self._turn_away(next(iter(self._strangers)), "too many connections")

    def _turn_away(self, wire: Wire, why: str) -> None:
        wire.close(why)
        self._strangers.pop(wire, None)

    def _on_wire(self, wire: Wire) -> None:
        for message in wire.read():
            if wire.host:
                self._hear(wire.host, message)
            elif not wire.closed_by:
                self._greet(wire, message)
        if not wire.closed_by:
            return
        self._strangers.pop(wire, None)
        if wire.host:
            host, wire.host = wire.host, ""
            del self._wires[host]
            if self.verdict is None:
                self._consider(LOST, self._lost(host, f"was lost: {wire.closed_by}"))

    def _greet(self, wire: Wire, message: Mapping[str, Any]) -> None:
        """Take a hello; whoever says anything else is none of ours."""
        hello = message.get("hello")
        if not isinstance(hello, dict):
            self._turn_away(wire, "said no hello")
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
            self._turn_away(wire, "refused")
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
        all_here = len(self._wires) == len(self._hosts) - 1
        if all_here and self._all_can and not self._cases and not self.verdict:
            self._start()

    def _compare(self, host: str, hello: Mapping[str, Any]) -> None:
        """Make a verdict of what differs between that host and this one."""
        theirs = hello.get("alike")
        if not isinstance(theirs, dict) or not theirs:
            theirs, self._all_can = {}, False  # it is about to say why
        ours = self._alike if theirs else {}
        theirs = {"list of hosts": hello.get("hosts"), **theirs}
        for what, value in {"list of hosts": list(self._hosts), **ours}.items():
            if theirs.get(what) != value:
                text = (
                    f"launcher: {self._me} and {host} differ in their {what}: {short(value)} and "
                    f"{short(theirs.get(what))}; expected the same on every host."
                )
                self._decide(Verdict(EXIT_USAGE, text + "\n"))
                return

    def _start(self) -> None:
        """All are here: nobody else need come any more."""
        self.go = True
        self._tell_all({"go": True})
        self._close_listener()

    def _close_listener(self) -> None:
        for wire in list(self._strangers):
            self._turn_away(wire, "all are here")
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _hear(self, host: str, message: Mapping[str, Any]) -> None:
        """Act on what a host says; nonsense from a host of ours is as good as silence."""
        if self.verdict:
            return
        with contextlib.suppress(LookupError, TypeError, ValueError, ArithmeticError):
            if "case" in message:
                case = message["case"]
                verdict = Verdict(int(case["exit_code"]), str(case["text"])[:_TEXT_LIMIT])
                self._consider(range(len(_PATIENCE))[case["kind"]], verdict)
            elif "stop" in message:
                number = range(65)[message["stop"]]
                # A rank that had failed by then is still why the job ends.
                failed = [case.verdict for case in self._cases if case.kind == OWN]
                self._decide(failed[0] if failed else Verdict(128 + number, "", number))
            elif "done" in message:
                self._done.add(host)
                if len(self._done) == len(self._hosts):
                    self._decide(Verdict(0))

    def _consider(self, kind: int, verdict: Verdict) -> None:
        now = time.monotonic()
        self._cases.append(_Case(kind, now, verdict))
        self._decide_at = min(self._decide_at, now + _PATIENCE[kind])

    def _best_case(self, now: float) -> Verdict:
        cases = [c for c in self._cases if c.kind != RESTARTED or now - c.time < _RECENT]
        return min(cases, key=lambda case: case.kind).verdict

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
        times = list(self._strangers.values())
        if not self.verdict:
            times += [self._decide_at, self._listen_at]
            times += [time.monotonic() + 0.05] if self._missing else super()._times()
        return times

    def _tick(self, now: float) -> None:
        for wire, until in list(self._strangers.items()):
            if now >= until:
                self._turn_away(wire, "said nothing")
        if self.verdict:
            return
        if now >= self._listen_at:
            self._listen()
        if now >= self._decide_at:
            self._decide(self._best_case(now))
        elif not self.go:
            self._call_roll(now)

    def _call_roll(self, now: float) -> None:
        if now < min(self._roll_at, self._start_deadline):
            return
        missing = [host for host in self._hosts[1:] if host not in self._wires]
        if not self._listener:
            missing = [self._me]  # it has no address for the others to come to
        if now < self._start_deadline:
            self._roll_at = now + _ROLL_EVERY
            self._tell_all({"missing": missing})
            _log_missing(missing)
        elif self._missing is None:
            self._missing = _LookUp(missing)
            self._missing.join(0.1)  # seldom any longer
            self._last_call = now + _TO_LOOK_UP
        if self._missing and (now >= self._last_call or not self._missing.is_alive()):
            how = f"did not arrive within {self._start_timeout} s"
            self._decide(self._lost(self._missing.words(), how))

    def close(self) -> None:
        self._close_listener()
        for wire in self._wires.values():
            wire.close("the job has ended")
        super().close()


class OtherHost(Peers):
    """The end of every other host."""

    def __init__(
        self, cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]
    ) -> None:
        super().__init__(cluster, port, start_timeout, alike)
        self._wire: Wire | None = None
        self._welcome = False
        self._to_say: list[Mapping[str, Any]] = []
        self._answer_by = math.inf
        self._trouble = "it does not answer"
        self._over = threading.Event()
        self._connected: list[socket.socket] = []
        self._bell, bell = socket.socketpair()  # rung by the thread when it is through
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_connected)
        threading.Thread(target=self._connect, args=(bell,), daemon=True).start()

    def _connect(self, bell: socket.socket) -> None:
        """In a thread, since looking up a name can take seconds: reach the first host."""
        with bell:
            while not self._over.is_set():
                own, first = _address(self._me), _address(self._first)
                if not own or not first:
                    self._trouble = f"the name {self._first if own else self._me} does not resolve"
                    self._over.wait(_NAME_RETRY)
                    continue
                try:
                    to = (first, self._port)
                    self._connected.append(socket.create_connection(to, _TO_GREET, (own, 0)))
                    return
                except OSError as error:
                    refused = isinstance(error, ConnectionRefusedError)
                    self._trouble = "nothing listens there" if refused else "it does not answer"
                    self._over.wait(_RETRY)

    def _on_connected(self) -> None:
        self._selector.unregister(self._bell)
        self._bell.close()
        if not self._connected:
            return  # it gave up when told to
        self._wire = Wire(self._connected.pop(), self._selector, self._on_wire)
        self._wire.host = self._first
        self._answer_by = time.monotonic() + _TO_ANSWER
        hello = {"job": self._job, "host": self._me, "hosts": self._hosts, "alike": self._alike}
        self._wire.say({"hello": hello})
        while self._to_say:
            self._wire.say(self._to_say.pop(0))

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._wire:
            self._wire.say(message)
        else:
            self._to_say.append(message)
            if "stop" in message and self.verdict is None:
                self.verdict = Verdict(128 + message["stop"], "", message["stop"])

    def _all_know(self) -> bool:
        return self.verdict is not None and not self._to_say

    def _on_wire(self, wire: Wire) -> None:
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
            self._roll_at = now + _ROLL_EVERY
            log(f"waiting for {self._first} ({self._trouble}).")

    def close(self) -> None:
        self._over.set()
        self._bell.close()
        if self._wire:
            self._wire.close("the job has ended")
        super().close()


def _address(host: str) -> str:
    """Return the address of a name, "" if it has none; takes many seconds where nobody answers."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""


class _LookUp(threading.Thread):
    """Looks names up in a thread, since one can take many seconds.

    `addresses` maps each name to its address, "" if it has none, None if that is not known yet.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        super().__init__(daemon=True)
        self.addresses: dict[str, str | None] = dict.fromkeys(hosts)
        self.start()

    def run(self) -> None:
        for host in self.addresses:
            self.addresses[host] = _address(host)

    def words(self) -> str:
        """Return the names, each with whether it resolves."""
        return ", ".join(
            f"{host} (its name {'resolves' if address else 'does not resolve'})"
            for host, address in self.addresses.items()
        )


def _log_missing(hosts: Iterable[str]) -> None:
    def wait() -> None:
        looked_up = _LookUp(hosts)
        looked_up.join()
        log(f"waiting for {looked_up.words()}.")

    threading.Thread(target=wait, daemon=True).start()


def _bounded(value: Any) -> Any:
    """Return a value to compare, or what tells it from others where it is long."""
    text = json.dumps(value)
    if len(text) <= _TEXT_LIMIT:
        return value
    import hashlib  # 3 ms that short values need not cost

    return f"{text[:40]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"
