"""The coordinator's phases and state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Union

from launcher.job.job import Job
from launcher.peers.events import Action, StoreMade
from launcher.peers.messages import Cleared, End, Hello, Succeeded
from launcher.result.causes import Failure, Result
from launcher.watch import judge


class Joining(NamedTuple):
    """Hosts join; the coordinator compares what must agree."""

    deadline: float
    log_missing_at: float


class Running(NamedTuple):
    """All hosts have joined and run an attempt."""


# Why an attempt fails: what was reported, in order, each with the time when it occurred.
Failures = tuple[tuple[Failure, float], ...]


class Deciding(NamedTuple):
    """A host has failed or is lost; a better cause may come until the deadline.

    It `is_stopped` if a host was stopped meanwhile. The failure still counts; but that a torchrun
    ends its ranks is no cause then: it may do so because of the stop.
    """

    deadline: float
    failures: Failures
    is_stopped: bool = False


class Clearing(NamedTuple):
    """All hosts end their ranks, by the last End.

    Then the job ends, or the next attempt starts if the End says so and nothing prevents it. If
    there are `failures`, they decide that then; the End's result is what they said before.
    """

    end: End
    deadline: float
    failures: Failures = ()
    cleared: Mapping[str, Cleared] = {}  # by host


class Ended(NamedTuple):
    """The other hosts were told to leave; this one leaves at `leave_at`. Infinite: it was told."""

    result: Result
    leave_at: float


JobPhase = Union[Joining, Running, Deciding, Clearing, Ended]


class JobState(NamedTuple):
    """The coordinator's state."""

    job: Job
    phase: JobPhase
    hello: Hello  # this host's own
    absent: frozenset[str]  # hosts that have not joined yet
    longest_grace: float = 0.0  # of all hosts that have joined
    attempt: int = 0  # 0: not all hosts have joined yet
    attempt_began: float = 0.0
    joined: Mapping[str, str] = {}  # that have joined and are not lost, with their addresses
    number: int = 0  # of the last End
    store: StoreMade | None = None  # of the next attempt
    failed: tuple[str, ...] = ()  # who had failed in earlier attempts, and how
    succeeded: tuple[tuple[float, str, Succeeded], ...] = ()  # when a rank ended, and where
    watch: judge.Stalls = judge.Stalls()  # ranks without progress, and where ranks are

    @property
    def others(self) -> list[str]:
        """The other hosts that have joined, and are not lost."""
        return [host for host in self.joined if host != self.job.current_host]

    @property
    def result(self) -> Result | None:
        """How the job ends, if decided."""
        phase = self.phase
        if isinstance(phase, Clearing):
            return None if phase.end.restart else phase.end.result
        return phase.result if isinstance(phase, Ended) else None


JobStep = tuple[JobState, tuple[Action, ...]]
