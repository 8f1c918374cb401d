"""The two state machines of the job's hosts as one: that of the first host, and of every other.

    state, actions = begin(job, now)
    state, actions = step(state, event, now)

A host imports only the one that it needs. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

from launcher.peers.events import Job

if TYPE_CHECKING:
    from launcher.peers import first_state, other_state

    State = Union[first_state.State, other_state.State]

_LIMIT = 1 << 12  # characters of a value to compare, so that a hello stays within its line


def job_of(
    me: str,
    hosts: tuple[str, ...],
    name: str,
    port: int,
    start_timeout: int,
    fingerprint: Mapping[str, Any],
) -> Job:
    """Return the job as its host `me` sees it; start_timeout in seconds.

    `fingerprint` maps what must agree between hosts, in words for a message, to its values here: a
    text or a list of texts. The list of hosts is added to it. It is empty if this host cannot
    start.
    """
    values = {"list of hosts": list(hosts), **fingerprint} if fingerprint else {}
    bounded = {what: _bounded(value) for what, value in values.items()}
    return Job(me, hosts, frozenset(hosts[1:]), name, port, start_timeout, bounded)


def begin(job: Job, now: float) -> tuple[State, tuple[Any, ...]]:
    """Return the state at the launcher's start, and the actions to carry out."""
    return _machine(job).begin(job, now)  # type: ignore[no-any-return]


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while all ranks run."""
    return _machine(state.job).due(state)  # type: ignore[no-any-return]


def step(state: State, event: Any, now: float) -> tuple[State, tuple[Any, ...]]:
    """Return the state after an event, and the actions to carry out."""
    return _machine(state.job).step(state, event, now)  # type: ignore[no-any-return]


def meaning(state: State, event: Any) -> Any:
    """Return what an event says of a host, as the rules have it; None for nothing."""
    return _machine(state.job).meaning(state, event)


def _machine(job: Job) -> Any:
    if job.current_host == job.first:
        from launcher.peers import first

        return first
    from launcher.peers import other

    return other


def _bounded(value: Any) -> Any:
    """Return a value to compare, or what tells it from others if it is long."""
    text = json.dumps(value)
    if len(text) <= _LIMIT:
        return value
    import hashlib  # 3 ms that short values need not cost

    length = f"{len(value)} in all" if isinstance(value, list) else f"{len(value)} characters"
    return f"{text[:40]}... ({length}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"
