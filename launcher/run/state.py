"""The state of this host's run, and what rules of several files do with it. Pure."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

from launcher.events import Log, Tell
from launcher.result.causes import SECONDARY_PATIENCE, Failure, Result
from launcher.result.failure_text import of_ranks
from launcher.rules import PhaseEnum, Rules
from launcher.run.events import (
    Answer,
    SignalTorchrun,
    Why,
)
from launcher.run.ranks import Rank, Ranks
from launcher.text import lasted

# All in seconds. torchrun kills what ignores a stop when the grace is over; so much later we do.
MARGIN = 5.0
# For a sys.excepthook to choose a rank's exit code, before the other hosts are told without it.
TO_BE_CERTAIN = 2.5
_WORTH_SAYING = 1.0  # what the end took


class Phase(PhaseEnum):
    """What this host is doing; the deadline of a state is that of its phase."""

    JOINING = "joining", "This host waits until all hosts have joined."
    LEAVING = "leaving", "This host starts nothing, and tells the other hosts why."
    RUNNING = "running", "torchrun and the ranks run."
    FAILING = (
        "failing",
        "A rank has failed; torchrun has not seen it end yet.",
        f"failure grace for the rank to end, then as long (at least {MARGIN:g} s) for torchrun",
    )
    HOLDING = (
        "holding",
        "torchrun waits before it ends the ranks: a better cause may come.",
        f"{SECONDARY_PATIENCE:g} s",
    )
    ENDING = (
        "ending",
        "torchrun ends the ranks: one failed here or on another host, or torchrun cannot go on.",
        f"up to {MARGIN:g} s for torchrun to ask, then failure grace",
    )
    STOPPING = (
        "stopping",
        "The ranks save.",
        f"up to {MARGIN:g} s for torchrun to ask, then grace and {MARGIN:g} s; "
        f"{MARGIN:g} s once no rank runs",
    )
    RESTARTING = "restarting", "torchrun ends the ranks, to start them again."
    CLEARING = (
        "clearing",
        "torchrun starts the ranks again once what the last attempt left behind has ended.",
        f"failure grace, then {MARGIN:g} s of SIGKILL",
    )
    KILLING = "killing", "All processes of the job are killed.", "1 s, again and again"
    DRAINING = (
        "draining",
        "torchrun has ended; what the ranks left behind is being ended.",
        f"failure grace, or what a stop's grace has left; then {MARGIN:g} s of SIGKILL",
    )
    WAITING = "waiting", "Nothing is left on this host; the other hosts go on."
    DONE = "done", "The launcher reports the job's result and ends."


P = Phase
RULES: Rules[State] = Rules()
when = RULES.when


class Job(NamedTuple):
    """What does not change; times in seconds."""

    current_host: str
    hosts: Sequence[str]
    endpoint: str  # where torchruns meet
    grace: float  # that a stop leaves the ranks
    failure_grace: float  # for a failed rank to end, and then for the others
    has_peers: bool  # the launchers of several hosts talk
    verbose: bool = False  # log each step


class State(NamedTuple):
    """All that is known of this host's run. Times are on the clock time.monotonic()."""

    job: Job
    ranks: Ranks  # that have started in this attempt
    phase: Phase = Phase.JOINING
    deadline: float = math.inf  # when the phase's time is over
    began: float = 0.0  # when the launcher did
    started: float = 0.0  # when torchrun was
    trains_since: float = math.inf  # when the first rank started
    failed: tuple[int, ...] = ()  # pids of the ranks that failed in this attempt, the first first
    untold: tuple[int, ...] = ()  # of those, whose exit codes are not certain yet
    certain_by: float = math.inf  # when the other hosts are told without them
    closing: Why | None = None  # why torchrun ends the ranks
    closing_at: float = math.inf
    torchrun_error: str = ""  # what it raised for a reason of its own
    stop_signal: int = 0
    late_stop: int = 0  # one that came after a failure, which may be taken back
    interrupts: tuple[float, ...] = ()  # when SIGINT came
    leftovers_by: float = math.inf  # when what ranks left behind is killed
    killed_at: float = math.inf  # when SIGKILL was sent first, to that or to torchrun
    told: frozenset[int] = frozenset()  # pids of processes that were told to end
    returncode: int | None = None  # torchrun's
    ended: float = math.inf  # when torchrun had
    failure: Failure | None = None  # why this host failed
    result: Result | None = None  # how all hosts end, or this one if it is alone

    @property
    def alive(self) -> list[Rank]:
        """The ranks that run."""
        return [rank for rank in self.ranks.values() if rank.runs]

    def took(self, now: float) -> str:
        """Return in words how long each part of the job took on this host, until now."""
        ended = min(self.ended, now)
        first = min(self.trains_since, ended)
        closed = max(first, min(self.closing_at, ended))
        parts = [("joining", (self.started or now) - self.began)] if self.job.has_peers else []
        if self.started:
            parts.append(("start", first - self.started))
        if self.trains_since < math.inf:
            parts.append(("training", closed - first))
        if self.started and now - closed >= _WORTH_SAYING:
            parts.append(("saving" if self.stop_signal else "ending", now - closed))
        said = [f"{part} {lasted(seconds)}" for part, seconds in parts]
        return ", ".join(said if self.started else [*said, "nothing was started"])


Actions = tuple[Any, ...]
Step = tuple[State, Actions]


# What rules of several files do.


def enter(state: State, phase: Phase, deadline: float = math.inf, **changes: Any) -> State:
    """Return the state in a phase, whose time is over at the deadline."""
    return state._replace(phase=phase, deadline=deadline, **changes)


def end_ranks(state: State, why: Why, now: float, error: str = "") -> Step:
    """Answer torchrun: from now on ranks end because it ends them, within their grace."""
    error = error or state.torchrun_error
    state = answered(state)._replace(closing=why, closing_at=now, torchrun_error=error)
    if why is Why.RESTART:
        return enter(state, P.RESTARTING), (Answer(),)
    by = now + state.job.failure_grace
    actions: Actions = (Answer(state.job.failure_grace + MARGIN),)
    return enter(state, P.ENDING, by, leftovers_by=by), actions


def answered(state: State) -> State:
    """Return the state when torchrun tells the ranks to end, which it does once."""
    return state._replace(told=state.told | {rank.pid for rank in state.alive})


def tell_certain(state: State, now: float, *, everything: bool = False) -> Step:
    """Tell the other hosts of the ranks that failed, once their exit codes are certain."""
    everything = everything or now >= state.certain_by
    actions: Actions = ()
    untold = []
    for pid in state.untold:
        rank = state.ranks[pid]
        if rank.exit_code is None and not everything:
            untold.append(pid)
        elif state.result is None and rank.failure:
            seconds = now - state.started
            actions += (Tell(of_ranks([rank.failure], state.job.current_host, seconds)),)
    by = state.certain_by if untold else math.inf
    return state._replace(untold=tuple(untold), certain_by=by), actions


def to_pass_on(grace: float) -> float:
    """Return how many seconds torchrun has to ask, once it was told to end ranks with a grace.

    It may hang, or wait for the store of a lost host; then the launcher signals the ranks itself,
    and they have the rest of their grace.
    """
    return max(1.0, min(MARGIN, grace / 2))


def kill_torchrun(state: State, now: float) -> Step:
    """Kill a torchrun that no rank runs below; what they left behind may have time yet."""
    line = "no rank runs any more, but torchrun does not end: killing it with SIGKILL."
    state = state._replace(deadline=now + MARGIN)
    return state, (Log(line), SignalTorchrun(signal.SIGKILL))
