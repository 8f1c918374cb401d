"""The coordinator's phases, and what it knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Union

from launcher.job.job import Job
from launcher.peers import ends
from launcher.peers.events import Action, StoreMade
from launcher.peers.messages import Hello
from launcher.result.causes import Failure, Result
from launcher.watch import judge, stacks


class Joining(NamedTuple):
    """Hosts join; what must agree is compared."""

    deadline: float
    log_missing_at: float


class Running(NamedTuple):
    """All hosts have joined and run an attempt."""

    succeeded: frozenset[str] = frozenset()


class Deciding(NamedTuple):
    """A host has failed or is lost; a better cause may come until the deadline."""

    deadline: float
    failure: Failure  # the best cause that is known
    failed_at: float  # when that cause was one
    succeeded: frozenset[str]
    failures: int = 0  # of ranks
    may_restart: bool = True
    broken: str = ""  # hardware, in words: then there is no restart


class Clearing(NamedTuple):
    """All hosts end their ranks, by the last End.

    Then the job ends with the result, or the next attempt starts, if there is a `reason`: the
    failure for which the job restarts.
    """

    result: Result
    deadline: float
    reason: Failure | None = None
    cleared: frozenset[str] = frozenset()


class Ended(NamedTuple):
    """All hosts were told to leave, but perhaps this one: it does so at `leave_at`."""

    result: Result
    leave_at: float


JobPhase = Union[Joining, Running, Deciding, Clearing, Ended]


class JobState(NamedTuple):
    """All that the coordinator knows."""

    job: Job
    phase: JobPhase
    hello: Hello  # this host's own
    absent: frozenset[str]  # hosts that have never joined, and may
    grace: float  # the longest of all hosts that have joined
    attempt: int = 0  # 0: not all hosts have joined yet
    attempt_began: float = 0.0
    members: Mapping[str, str] = {}  # that have joined and are not lost, with their addresses
    number: int = 0  # of the last End
    store: StoreMade | None = None  # of the next attempt
    kinds: tuple[str, ...] = ()  # of failures, of the attempts before
    refused: int = 0  # connections
    ends: Mapping[str, ends.Ends] = {}  # of ranks that have ended with 0, by host
    watch: judge.Stalls = judge.Stalls()  # ranks without progress
    gathering: stacks.Gathering = stacks.Gathering()  # of where ranks are

    @property
    def result(self) -> Result | None:
        """How the job ends, if that is decided."""
        phase = self.phase
        if isinstance(phase, Ended) or (isinstance(phase, Clearing) and not phase.reason):
            return phase.result
        return None


JobStep = tuple[JobState, tuple[Action, ...]]
