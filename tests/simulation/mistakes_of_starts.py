"""Mistakes around ranks that are the launcher's children: their start, their reaping, who is told.

(!) marks those that a launcher has once had.
"""

from __future__ import annotations

from typing import Any

from launcher.run import machine
from launcher.run.events import ReplyToRank
from launcher.run.reports import Reports
from launcher.run.supervisor import Supervisor
from simulation.planting import Planter, mistake

# Who runs.


@mistake("a rank is let go after a stop")
def _(plant: Planter) -> None:
    def goes(plain: Any, state: Any, event: Any, now: float) -> Any:
        return plain(state, event, now)[0], (ReplyToRank(event.pid, lets_go=True),)

    plant.around(machine, "rank_runs", goes)


@mistake("a rank is let go that is not known")
def _(plant: Planter) -> None:
    def forgets(plain: Any, state: Any, event: Any, now: float) -> Any:
        after, actions = plain(state, event, now)
        return after._replace(ranks=state.ranks), actions

    plant.around(machine, "rank_runs", forgets)


@mistake("a rank that comes too late is left waiting")
def _(plant: Planter) -> None:
    def waits(plain: Any, reports: Any, pid: int, *, lets_go: bool) -> None:
        if lets_go:
            plain(reports, pid, lets_go=True)

    plant.around(Reports, "reply_to_rank", waits)


@mistake("a rank that does not come to be is not heard of")
def _(plant: Planter) -> None:
    def deaf(plain: Any, reports: Any, message: Any) -> Any:
        return None if "not_started" in message else plain(reports, message)

    plant.around(Reports, "_event_of_torchrun", deaf)


# What was reaped.


@mistake("(!) a rank is signalled after it was reaped")
def _(plant: Planter) -> None:
    plant.set(Supervisor, "_unreaped", lambda one, pids: list(pids))


@mistake("(!) an end is taken in before all is read that was said before")
def _(plant: Planter) -> None:
    def early(plain: Any, supervisor: Any, *, is_quiet: bool) -> None:
        plain(supervisor, is_quiet=True)

    plant.around(Supervisor, "_do_what_is_due", early)


@mistake("(!) the word of a rank is lost that is reaped before it is read")
def _(plant: Planter) -> None:
    def deaf(plain: Any, reports: Any, connection: Any, pid: int, rank: int) -> Any:
        if pid in reports.exit_codes:
            return None
        return plain(reports, connection, pid, rank)

    plant.around(Reports, "_rank_runs", deaf)


# What torchrun is told.


def in_what_is_told(plant: Planter, change: Any) -> None:
    """Have torchrun be told something else."""
    plant.around(Reports, "_send", change)


@mistake("an exit code is told behind the answer")
def _(plant: Planter) -> None:
    held: list[Any] = []

    def late(plain: Any, reports: Any, message: Any) -> None:
        if "exit_code" in message:
            held.append(message)
            return
        plain(reports, message)
        while "request" in message and held:
            plain(reports, held.pop())

    in_what_is_told(plant, late)


@mistake("an exit code is not told")
def _(plant: Planter) -> None:
    def silent(plain: Any, reports: Any, message: Any) -> None:
        if "exit_code" not in message:
            plain(reports, message)

    in_what_is_told(plant, silent)


@mistake("another exit code is told")
def _(plant: Planter) -> None:
    def wrong(plain: Any, reports: Any, message: Any) -> None:
        other = {"exit_code": abs(message["exit_code"])} if "exit_code" in message else {}
        plain(reports, {**message, **other})

    in_what_is_told(plant, wrong)


@mistake("a pid is not told")
def _(plant: Planter) -> None:
    def silent(plain: Any, reports: Any, message: Any) -> None:
        if "pid" not in message:
            plain(reports, message)

    in_what_is_told(plant, silent)
