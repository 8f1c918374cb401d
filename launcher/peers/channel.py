"""The launchers of one job talk: they start together, end together, and give one reason.

Each host's launcher keeps one TCP connection to that of the first host (`--launcher-peer-port`),
which decides for all. What is said is lines of JSON, each at most 64 KiB, in this order:

    a host                                        the first host
    {"hello": {"job", "host", "alike"}}
                                                  {"welcome": true}   counted; wait for the others
                                                  {"refused": why}    not of this job; hangs up
                                                  {"later": true}     no room now; hangs up
                                                  {"missing": [[host, resolves], ...], "more": n}
                                                                      who is not here, every 30 s
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
meant for the job's own network. first_host.py and other_host.py are the two ends.

Which case becomes the verdict: a rank that failed for a reason of its own, before a host that was
lost, before a torchrun that failed, before a rank that torchrun restarted a moment ago, before one
that was aborted, before a rank that only heard of another's death. The first host waits a moment
for a better one than it has.
"""

from __future__ import annotations

import json
import math
import selectors
import signal
import time
from collections.abc import Mapping
from typing import Any

from launcher.errors import EXIT_HOST_LOST
from launcher.job.cluster import Cluster
from launcher.result.failure import LIMIT, Verdict
from launcher.signals import Signals

# All in seconds.
TO_GREET = 4  # for a connection to say hello, and for an address to take one
TO_TELL = 3  # for a host that leaves before the start, to tell the others
ROLL_EVERY = 30  # between two lines on who is missing
_ALIKE_LIMIT = 1 << 12  # characters of a value to compare, so that a hello stays within its line


def join(cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]) -> Peers:
    """Open this host's end of the channel.

    `alike` maps what has to agree between hosts, in words for a message, to its values here: a text
    or a list of texts. It is empty where this host cannot start. Use it in a `with` statement, and
    call `roll_call` next. Raises LaunchError where the first host cannot listen (exit code 2).
    """
    if cluster.node_rank == 0:
        from launcher.peers.first import FirstHost

        return FirstHost(cluster, port, start_timeout, alike)
    from launcher.peers.other import OtherHost

    return OtherHost(cluster, port, start_timeout, alike)


class Peers:
    """One launcher's end of the channel. A selector can wait for it; then `act` is due.

    Attributes: `go`, all hosts are here; `verdict`, how the job ends, once that is known;
    `store_is_lost`, the first host is lost, and torchrun's store with it; from `go` on
    `own_address`, where the other hosts reach this one, and `name_leads_here`, whether this host
    finds an address for its own name (only the first host needs to, and knows).
    """

    def __init__(
        self, cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]
    ) -> None:
        self.go = False
        self.verdict: Verdict | None = None
        self.store_is_lost = False
        self.own_address = ""
        self.name_leads_here = True
        self._me = cluster.current_host
        self._hosts = cluster.hosts
        self._first = cluster.hosts[0]
        self._port = port
        self._start_timeout = start_timeout
        self._started = time.monotonic()
        self._roll_at = self._started + ROLL_EVERY
        self._job = cluster.job_name
        self._alike: dict[str, Any] = {}
        if alike:
            values = {"list of hosts": list(cluster.hosts), **alike}
            self._alike = {what: _bounded(value) for what, value in values.items()}
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
        until = time.monotonic() + TO_TELL
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
        exit_code = exit_code if 0 < exit_code < 256 else 1  # a failure is never a success
        text = text[:LIMIT] if text.strip() else f"{self._me} failed\n"
        self._say({"case": {"kind": kind, "exit_code": exit_code, "text": text}})

    def stop(self, number: int) -> None:
        """Say that this host was told to stop: all are to."""
        self._say({"stop": number})

    def done(self) -> None:
        """Say that all ranks of this host have succeeded."""
        self._say({"done": True})

    def give_back_limit(self, pid: int) -> None:
        """Give a child the limit on open files that this process had before the channel."""

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
        return Verdict(EXIT_HOST_LOST, f"{host[:900]} {how}\nexit code {EXIT_HOST_LOST}\n")


def _bounded(value: Any) -> Any:
    """Return a value to compare, or what tells it from others where it is long."""
    text = json.dumps(value)
    if len(text) <= _ALIKE_LIMIT:
        return value
    import hashlib  # 3 ms that short values need not cost

    length = f"{len(value)} in all" if isinstance(value, list) else f"{len(value)} characters"
    return f"{text[:40]}... ({length}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"
