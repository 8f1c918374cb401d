"""The coordinator's phases, and what it knows. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Union

from launcher.job.job import Job
from launcher.peers import ends
from launcher.peers.events import Action
from launcher.peers.messages import Hello
from launcher.result.causes import Failure, Result
from launcher.watch import judge, stacks


class JobJoining(NamedTuple):
    """Hosts join; what must agree is compared."""

    deadline: float
    log_missing_at: float


class JobRunning(NamedTuple):
    """All hosts have joined and run an attempt.

    After a restart `rendezvous_deadline` is that of their torchruns' rendezvous, for which those
    `at_rendezvous` wait.
    """

    succeeded: frozenset[str] = frozenset()
    rendezvous_deadline: float = math.inf
    at_rendezvous: frozenset[str] = frozenset()


class JobFailing(NamedTuple):
    """A host has failed or is lost; a better cause may come until the deadline."""

    deadline: float
    failure: Failure  # the best cause that is known
    failures: int  # of ranks
    may_restart: bool
    succeeded: frozenset[str]
    failed_at: float  # when that cause was one
    broken: str = ""  # hardware, in words: then there is no restart


class JobRestarting(NamedTuple):
    """Hosts end this attempt's ranks, for the next one to start when all have.

    The deadline is that of all hosts for this, and for their torchruns' next rendezvous.
    """

    failure: Failure
    deadline: float
    cleared: frozenset[str] = frozenset()


class JobEnded(NamedTuple):
    """It is decided how the job ends; all hosts that have joined have been sent it."""

    result: Result


JobPhase = Union[JobJoining, JobRunning, JobFailing, JobRestarting, JobEnded]


class JobState(NamedTuple):
    """All that the coordinator knows."""

    job: Job
    phase: JobPhase
    hello: Hello  # this host's own
    attempt: int = 0  # 0: not all hosts have joined yet
    attempt_began: float = 0.0
    members: Mapping[str, str] = {}  # that have joined and are not lost, with their addresses
    arrived: frozenset[str] = frozenset()  # that have joined, or know how the job ends
    no_ranks: frozenset[str] = frozenset()  # hosts on which no rank of this attempt runs
    kinds: tuple[str, ...] = ()  # of failures, of the attempts before
    refused: int = 0  # connections
    ends: ends.Known = ends.NONE  # of ranks that have ended with 0
    watch: judge.Stalls = judge.Stalls()  # ranks without progress
    gathering: stacks.Gathering = stacks.Gathering()  # of where ranks are


JobStep = tuple[JobState, tuple[Action, ...]]
