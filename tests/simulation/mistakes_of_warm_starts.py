"""Mistakes around the process that forks torchrun and ranks: its end, its answers, and a stop.

(!) marks those that a launcher has once had.
"""

from __future__ import annotations

import math
from typing import Any

from launcher.run.events import StartTorchrun
from launcher.run.starts import Nursery, Starts
from launcher.run.supervisor import Supervisor
from simulation.nursery import Fork
from simulation.planting import Planter, mistake
from simulation.ranks import NOT_LET_GO

# Its end.


@mistake("a nursery that has died is waited for")
def _(plant: Planter) -> None:
    def deaf(plain: Any, nursery: Any, message: Any) -> None:
        if message is None:
            nursery._process.close(kill=False)
        else:
            plain(nursery, message)

    plant.around(Nursery, "_received", deaf)
    plant.set(Nursery, "ended", lambda nursery: None)


@mistake("a nursery that dies between two forks is waited for")
def _(plant: Planter) -> None:
    """By torchrun (run/agent.py), as the model of it has it."""

    def waits(plain: Any, fork: Any, has_said: bool) -> None:
        if has_said:
            plain(fork, has_said)

    plant.around(Fork, "answered", waits)


@mistake("(!) a rank ends whose nursery has died before it has said its pid to it")
def _(plant: Planter) -> None:
    """In run/rank.py, as the model of it has it."""

    def ends(plain: Any, fork: Any) -> None:
        if fork.nursery.runs:
            plain(fork)
        else:
            fork.process.end(NOT_LET_GO)

    plant.around(Fork, "knows", ends)


@mistake("a nursery that is late is waited for")
def _(plant: Planter) -> None:
    plant.set(Nursery, "due", lambda nursery: math.inf)


@mistake("a host whose nursery cannot fork does not start")
def _(plant: Planter) -> None:
    plant.set(Starts, "_again", property(lambda starts: lambda: None, lambda starts, again: None))


@mistake("a nursery is left when the launcher ends")
def _(plant: Planter) -> None:
    plant.set(Starts, "close", lambda starts: None)


# Its answers.


@mistake("an answer that comes too late is a second torchrun in the same folder")
def _(plant: Planter) -> None:
    def again(supervisor: Any) -> None:
        supervisor._do_start_torchrun(StartTorchrun(supervisor.state.attempt))

    plant.set(Supervisor, "_start_again", again)


# A stop.


@mistake("a torchrun killed early that has no process is waited for")
def _(plant: Planter) -> None:
    plant.set(Starts, "kill_early", lambda starts: setattr(starts, "_is_killed", True))


@mistake("a torchrun runs that was killed before its pid is known")
def _(plant: Planter) -> None:
    def runs(plain: Any, starts: Any, pid: int) -> None:
        starts._is_killed = False
        plain(starts, pid)

    plant.around(Starts, "runs", runs)


@mistake("a torchrun that was killed early starts cold when its nursery dies")
def _(plant: Planter) -> None:
    def starts_cold(plain: Any, starts: Any, why: str) -> None:
        starts._is_killed = False
        plain(starts, why)

    plant.around(Starts, "_starts_cold", starts_cold)


@mistake("a torchrun that was killed early has never ended")
def _(plant: Planter) -> None:
    def silent(plain: Any, starts: Any) -> None:
        ended, starts._ended = starts._ended, lambda code: None
        plain(starts)
        starts._ended = ended

    plant.around(Starts, "kill_early", silent)
