"""A simulated launcher: the real state machines of one host, and what takes the supervisor's place.

Like launcher/run/supervisor.py and launcher/peers/transport.py it turns what happens into events,
and carries actions out. It holds no policy.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.errors import EXIT_USAGE
from launcher.events import AllJoined, Time
from launcher.peers import agreement
from launcher.result.causes import Cause, Failure, Result
from launcher.run import events as own
from launcher.run import host as hosts
from launcher.run import machine as run_machine
from launcher.run import state
from simulation.effects import DO
from simulation.machine import Machine, Process
from simulation.network import End
from simulation.plan import What

if TYPE_CHECKING:
    from simulation.job import Job

PORT = 29401
FINGERPRINT = {"script's arguments": ["--lr", "0.1"]}
_REACHES = (0.0005, 0.01)  # seconds that a connection takes, where it comes to be
_NO_ANSWER = 4.0  # seconds, until one that does not is given up
_TOO_MANY = 3000  # ticks of one launcher: a timer that never stops


class Launcher:
    """The launcher of one host.

    Attributes: `result`, how it ended, None while it runs or if it was killed; `phase` of its run.
    """

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job = job
        self.machine = machine
        self.clock = job.clock
        self.runs = True
        self.result: Result | None = None
        self.started_at, self.ended_at = job.clock.now, math.inf
        self.stopping_since = math.inf
        self.torchrun: Process | None = None  # it, or the program that runs it
        self.stops: list[tuple[float, int]] = []  # signals that it was sent, and when
        self.ends: dict[int, End] = {}  # of connections, by number
        self.asked = 0  # the number of torchrun's last question
        self._wakes_at = math.inf
        self._ticks = self._depth = 0
        self._stands_still = False
        self._queue: deque[tuple[Any, Any, int]] = deque()
        plan, name, names = job.plan, machine.name, job.names
        several = len(names) > 1
        endpoint = f"{names[0]}:29400"
        chosen = state.Job(name, names, endpoint, plan.grace, plan.failure_grace, several)
        self.host = hosts.Host(run_machine.begin(chosen, self.clock.now))

    def begin(self) -> None:
        """Join the other hosts, or begin alone."""
        if len(self.job.names) == 1:
            self.hear(AllJoined(""))
            return
        cannot = self.job.of(self.machine, What.CANNOT_START)
        differs = self.job.of(self.machine, What.DIFFERS)
        other = {"script's arguments": ["--seed", str(self.machine.number)]}
        fingerprint = {} if cannot else other if differs else FINGERPRINT
        name, names = self.machine.name, self.job.names
        timeout = int(self.job.plan.start_timeout)
        chosen = agreement.job_of(name, names, "job", PORT, timeout, fingerprint)
        peers, actions = agreement.begin(chosen, self.clock.now)
        self.host = self.host._replace(peers=peers)
        self._carry_out(actions)
        if cannot:
            text = f"launcher: {name}: --train-script: there is none\n"
            self.hear(own.CannotStart(Failure(Cause.OWN, EXIT_USAGE, text)))

    # Events

    def hear(self, event: Any, asked: int = 0) -> None:
        """Take in what happens on this host; torchrun's questions have numbers."""
        self._take_in(hosts.step, event, asked)

    def learn(self, event: Any) -> None:
        """Take in the answer to an action, at once."""
        self._step(hosts.step, event)

    def signal(self, number: int) -> None:
        """Be sent a signal that stops a job."""
        self.stops.append((self.clock.now, number))
        self.hear(own.Signal(number))

    def hear_channel(self, event: Any) -> None:
        """Take in what happens on the network."""
        self._take_in(hosts.hear, event, 0)

    def on_child_ended(self) -> None:
        """A process has ended that is the launcher's child since its parent's end."""
        self.hear(own.ChildEnded())

    def _take_in(self, way: Any, event: Any, asked: int) -> None:
        if self._stands_still:
            self._queue.append((way, event, asked))
        elif self.runs:
            if asked:
                self.asked = asked
            self._step(way, event)

    def _step(self, way: Any, event: Any) -> None:
        before = self.host
        now = self.clock.now
        self.host, actions = way(before, event, now)
        self.job.watch.stepped(self, before, event, actions)
        self._carry_out(actions)

    def _carry_out(self, actions: Sequence[Any]) -> None:
        self._depth += 1  # an action may have an answer, which has actions
        for action in actions:
            if self.runs:
                DO[type(action)](self, action)
        self._depth -= 1
        if self._depth or not self.runs:
            return
        if self.host.is_done:
            result = self.host.run.result
            assert result is not None
            self.end(result)
            return
        due = hosts.due(self.host)
        if due < self._wakes_at:
            self._wakes_at = due
            self.clock.at(due, self._wake, due)

    def _wake(self, at: float) -> None:
        if at != self._wakes_at:
            return  # it was to wake earlier
        self._wakes_at = math.inf
        if self._stands_still:
            self._queue.append((None, Time(), 0))
        elif self.runs:
            self._tick()

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks > _TOO_MANY:
            self.job.watch.never_stops()
            self.die()
            return
        if hosts.due(self.host) <= self.clock.now:
            self._step(lambda host, _, now: hosts.tick(host, now), Time())
        else:
            self._wakes_at = hosts.due(self.host)
            if self._wakes_at < math.inf:
                self.clock.at(self._wakes_at, self._wake, self._wakes_at)

    # What the plan does to it

    def stand_still(self, seconds: float) -> None:
        """Do nothing for a while, as on a machine that has no time for it."""
        if self.runs and not self._stands_still:
            self._stands_still = True
            self.clock.after(seconds, self._go_on)

    def _go_on(self) -> None:
        self._stands_still = False
        waiting, self._queue = self._queue, deque()
        for way, event, asked in waiting:
            if way is None:
                self._tick() if self.runs else None
            else:
                self._take_in(way, event, asked)

    def die(self, *, told: bool = True) -> None:
        """Be killed; the kernel tells the other ends and torchrun, if it is still there itself."""
        if not self.runs:
            return
        self.runs = False
        self.ended_at = self.clock.now
        if told:
            self._hang_up()
            if self.torchrun:
                self.torchrun.signal(signal.SIGTERM)  # PR_SET_PDEATHSIG

    def end(self, result: Result) -> None:
        """End with a result."""
        self.runs = False
        self.result = result
        self.ended_at = self.clock.now
        self._hang_up()
        self.job.watch.ended(self)

    def _hang_up(self) -> None:
        if self.job.network.listener is self:
            self.job.network.stop_listening()
        for end in self.ends.values():
            end.close()
