"""The first host's end of the channel: who is here, and which case counts (peers.py)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.errors import EXIT_USAGE, log, short
from launcher.job.cluster import Cluster
from launcher.job.options import flag
from launcher.peers import addresses
from launcher.peers.channel import ROLL_EVERY, TO_TELL, Peers
from launcher.peers.connection import Wire, line_of
from launcher.peers.entrance import Entrance
from launcher.peers.messages import Hello, case_in, hello_in, missing_words, stop_in
from launcher.result.failure import ECHO, ECHO_PATIENCE, LOST, RESTARTED, Verdict

_REFUSALS = 20  # that the log shows
# All in seconds.
_TO_LOOK_UP = 2  # for names, before a line has to say whether they resolve
# Of each kind of case, for a better one.
_PATIENCE = (0.3, 0.5, 1.0, math.inf, ECHO_PATIENCE, ECHO_PATIENCE)
_RECENT = 5  # how long a restart may be the cause of an echo


class _Case(NamedTuple):
    kind: int
    time: float
    verdict: Verdict


class FirstHost(Peers):
    """The first host's end."""

    def __init__(
        self, cluster: Cluster, port: int, start_timeout: int, alike: Mapping[str, Any]
    ) -> None:
        super().__init__(cluster, port, start_timeout, alike)
        self._others = dict.fromkeys(host for host in self._hosts if host != self._me)
        self._wires: dict[str, Wire] = {}  # of the hosts that are welcome
        self._greeted: set[str] = set()
        self._refused = 0
        self._done: set[str] = set()
        self._cases: list[_Case] = []
        self._decide_at = math.inf
        self._names = addresses.LookUps()
        self._asked: Sequence[str] = ()
        self._ask_at = min(self._roll_at, self._start_deadline) - _TO_LOOK_UP
        if not alike:
            self._expect_why(self._me)
        self._entrance = Entrance(
            *(self._me, port, len(self._others), min(TO_TELL, start_timeout)),
            *(self._selector, self._on_wire),
        )
        self.name_leads_here = self._entrance.name_leads_here
        needs, files = self._entrance.needs, self._entrance.files
        if files < needs:
            text = (
                f"launcher: {self._me} can have {files} files open (ulimit -n), but the channel of "
                f"{len(self._hosts)} hosts needs {needs}; raise that limit, or leave the channel "
                f"out with {flag('peers')} false.\n"
            )
            self._decide(Verdict(EXIT_USAGE, text))

    def give_back_limit(self, pid: int) -> None:
        """Give a child the limit on open files that this process had before the channel."""
        self._entrance.give_back_limit(pid)

    def _say(self, message: Mapping[str, Any]) -> None:
        self._hear(self._me, message)

    # Who connects

    def _on_wire(self, wire: Wire) -> None:
        for message in wire.read():
            if wire.host:
                self._hear(wire.host, message)
            elif not wire.closed_by:
                self._greet(wire, message)
        if not wire.closed_by:
            return
        self._entrance.strangers.pop(wire, None)
        if wire.host:
            host, wire.host = wire.host, ""
            del self._wires[host]
            if self.verdict is None:
                self._consider(LOST, self._lost(host, f"was lost: {wire.closed_by}"))

    def _greet(self, wire: Wire, message: Mapping[str, Any]) -> None:
        """Take a hello; whoever says anything else is none of ours."""
        try:
            hello = hello_in(message)
        except ValueError:
            self._entrance.turn_away(wire, "said no hello")
            return
        host = hello.host
        why = ""
        if hello.job != self._job:
            why = f"this is job {self._job}, not {short(hello.job, 60)}"
        elif host not in self._others:
            why = f"{short(host, 60)} is no other host of this job"
        elif host in self._wires:
            why = f"{host} is here already, at {self._wires[host].address}"
        if why:
            self._refuse(wire, why)
            return
        self._greeted.add(host)
        wire.say({"welcome": True})
        if self.verdict:
            wire.say({"verdict": self.verdict._asdict()})
            self._entrance.turn_away(wire, "it has heard all")
            return
        self._entrance.take(wire)
        wire.host = host
        self._wires[host] = wire
        self._compare(hello)
        all_here = len(self._wires) == len(self._others)
        if all_here and not self._cases and not self.verdict:
            self._start(wire)

    def _refuse(self, wire: Wire, why: str) -> None:
        self._refused += 1
        if self._refused <= _REFUSALS:
            log(f"refused a connection from {wire.address} to port {self._port}: {why}.")
        wire.say({"refused": why})
        self._entrance.turn_away(wire, "refused")

    def _compare(self, hello: Hello) -> None:
        """Make a verdict of what differs between that host and this one."""
        if not hello.alike:
            self._expect_why(hello.host)
            return
        for what, value in self._alike.items():
            theirs = hello.alike.get(what)
            if theirs != value:
                text = (
                    f"launcher: {self._me} and {hello.host} differ in their {what}: {short(value)} "
                    f"and {short(theirs)}; expected the same on every host."
                )
                self._decide(Verdict(EXIT_USAGE, text + "\n"))
                return

    def _expect_why(self, host: str) -> None:
        """A host that cannot start is about to say why: that is a better case than this one."""
        self._consider(ECHO, Verdict(EXIT_USAGE, f"{host} cannot start, and did not say why\n"))

    def _start(self, wire: Wire) -> None:
        """All are here: nobody else need come any more."""
        self.go = True
        self.own_address = wire.own_address
        self._tell_all({"go": True})
        self._entrance.close()

    # What they say

    def _hear(self, host: str, message: Mapping[str, Any]) -> None:
        """Act on what a host says; messages that are not valid are ignored."""
        if self.verdict:
            return
        with contextlib.suppress(ValueError):
            if "case" in message:
                kind, verdict = case_in(message["case"])
                if kind != RESTARTED or self.go:
                    self._consider(kind, verdict)
            elif "stop" in message:
                number = stop_in(message["stop"])
                # What had failed by then, or the better cause that it waits for, is still why the
                # job ends.
                if all(case.kind == RESTARTED for case in self._cases):
                    self._decide(Verdict(128 + number, "", number))
            elif message.get("done") is True and self.go:
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
        return self.verdict is not None and len(self._greeted) == len(self._others)

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        line = line_of(message)
        for wire in self._wires.values():
            wire.send(line)

    # Time

    @property
    def _is_settled(self) -> bool:
        """Whether nobody is waited for: all are here, or the job is about to end."""
        return self.go or bool(self._cases)

    def _times(self) -> list[float]:
        times = self._entrance.times()
        if not self.verdict:
            times += [self._decide_at, self._entrance.listen_at]
            times += [] if self._is_settled else [self._ask_at, *super()._times()]
        return times

    def _tick(self, now: float) -> None:
        self._entrance.tick(now)
        if self.verdict:
            return
        if now >= self._entrance.listen_at:
            self._entrance.listen()
            self.name_leads_here = self._entrance.name_leads_here
        if now >= self._decide_at:
            self._decide(self._best_case(now))
        elif not self._is_settled:
            self._call_roll(now)

    def _call_roll(self, now: float) -> None:
        if now < min(self._ask_at, self._roll_at, self._start_deadline):
            return
        missing = [host for host in self._others if host not in self._wires]
        if now >= self._ask_at:
            self._asked = addresses.some_of(missing)
            self._names.ask(self._asked)
            self._ask_at = math.inf
        # Others may have come since.
        still = set(missing)
        named = [host for host in self._asked if host in still] or addresses.some_of(missing)
        found = {host: self._names.found(host) for host in named}
        resolve = {host: None if own is None else bool(own) for host, own in found.items()}
        more = len(missing) - len(named)
        if now >= self._start_deadline:
            how = f"did not arrive within {self._start_timeout} s"
            self._decide(self._lost(missing_words(resolve, more), how))
        elif now >= self._roll_at:
            self._roll_at = now + ROLL_EVERY
            self._ask_at = min(self._roll_at, self._start_deadline) - _TO_LOOK_UP
            self._tell_all({"missing": list(resolve.items()), "more": more})
            log(f"waiting for {missing_words(resolve, more)}.")

    def close(self) -> None:
        self._entrance.close()
        for wire in self._wires.values():
            wire.close("the job has ended")
        super().close()
