"""One host of a job: its run (machine.py) and, with several hosts, its part of their agreement.

What one of the two state machines tells the other reaches it here; all other actions are for the
supervisor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.events import AllJoined, Decided, Left, Log, Tell, Time
from launcher.run import machine
from launcher.run.state import Actions, Phase, State

if TYPE_CHECKING:
    from launcher.peers import agreement


class Host(NamedTuple):
    """Both machines of one host; `peers` is None if it is alone."""

    run: State
    peers: agreement.State | None = None

    @property
    def is_done(self) -> bool:
        """Whether this host has nothing left to do; `run.result` is how the job ends."""
        return self.run.phase is Phase.DONE


Step = tuple[Host, list[Any]]


def due(host: Host) -> float:
    """Return when `tick` is due, on the clock time.monotonic(); infinite: never."""
    if host.peers is None:
        return machine.due(host.run)
    from launcher.peers import agreement  # one host needs none, nor the 7 ms to import it

    return min(machine.due(host.run), agreement.due(host.peers))


def step(host: Host, event: Any, now: float) -> Step:
    """Return the host after an event of its own (run/events.py), and the actions to carry out."""
    run, actions = machine.step(host.run, event, now)
    if host.run.job.verbose:
        actions = _with_line(host, "run", host.run, event, run, actions, now)
    return _pass_on(host._replace(run=run), actions, now)


def hear(host: Host, event: Any, now: float) -> Step:
    """Return the host after an event of the channel between hosts, and the actions to carry out."""
    from launcher.peers import agreement

    assert host.peers is not None
    peers, actions = agreement.step(host.peers, event, now)
    if host.run.job.verbose:
        event = agreement.meaning(host.peers, event)
        actions = _with_line(host, "hosts", host.peers, event, peers, actions, now)
    return _pass_on(host._replace(peers=peers), actions, now)


def tick(host: Host, now: float) -> Step:
    """Return the host at a time, and the actions to carry out."""
    host, actions = step(host, Time(), now)
    if host.peers is not None:
        host, more = hear(host, Time(), now)
        actions += more
    return host, actions


def _pass_on(host: Host, actions: Sequence[Any], now: float) -> Step:
    """Tell each machine what the other one tells it; return the actions left to carry out."""
    left: list[Any] = []
    for action in actions:
        more: list[Any] = [action]
        if isinstance(action, Tell):
            if host.peers is not None:
                host, more = hear(host, action, now)
            else:
                more = []
        elif isinstance(action, (AllJoined, Decided, Left)):
            host, more = step(host, action, now)
        left += more
    return host, left


def _with_line(
    host: Host, name: str, before: Any, event: Any, after: Any, actions: Actions, now: float
) -> Actions:
    """Return a step's actions, behind the line that says what the step did."""
    from launcher.run import decisions  # which a job that logs little does not need

    line = decisions.line(name, before, event, after, actions, now - host.run.began)
    return (Log(line), *actions) if line else actions
