"""What is to happen in one simulated job: its size, its script, and what goes wrong when.

A plan and nothing else decides what happens: `seed` is where all delays come from. The repr() of a
plan replays its job (see __main__.py). Times are in seconds since the first launcher's start.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from simulation.faults import Fault, What, Word


class AtStop(Word):
    """What the script does when its own process hears a stop."""

    SAVES = "saves"  # for `save` seconds, then ends with `save_code`
    DIES = "dies"  # it has no handler
    IGNORES = "ignores"
    FAILS = "fails"  # it raises while it saves


class AtBreak(Word):
    """What the script does when another rank's end has broken the connection to it."""

    RAISES = "raises"  # an exception that says so
    WAITS = "waits"  # for ever, as in NCCL without a watchdog
    EXITS = "exits"  # it catches that one, and calls sys.exit(1)
    ABORTS = "aborts"  # as NCCL's watchdog has it
    GOES_ON = "goes on"  # it is in no collective


class Script(NamedTuple):
    """What every rank runs."""

    seconds: float = 10.0  # of training
    at_stop: AtStop = AtStop.SAVES
    save: float = 0.5
    save_code: int = 0
    at_break: AtBreak = AtBreak.RAISES
    upload: float = 0.0  # how long a process goes on that each rank has started; 0: there is none
    upload_ignores: bool = False  # SIGTERM
    is_python: bool = True  # or it tells the launcher nothing, and has its handlers at once


class Plan(NamedTuple):
    """One job. Of the times, `grace` is for a stop and `failure_grace` for a failure."""

    hosts: int = 2
    nproc: int = 1  # ranks of each host
    script: Script = Script()
    max_restarts: int = 0
    grace: float = 10.0
    failure_grace: float = 4.0
    start_timeout: float = 60.0
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    runner: float | None = None  # seconds of own work of a program that runs torchrun, if one does
    watch: float = 0.0  # seconds between two looks at how far ranks are; 0: none
    hang_timeout: float = 0.0  # --launcher-hang-timeout in seconds; 0: none

    def options(self) -> dict[str, float]:
        """Return the launcher's options."""
        names = ("max_restarts", "grace", "failure_grace", "start_timeout", "watch")
        options = {name: getattr(self, name) for name in names}
        return {**options, "hang_timeout": self.hang_timeout or math.inf}

    def names(self) -> tuple[str, ...]:
        """Return the hosts' names, sorted as SageMaker's are."""
        return tuple(f"algo-{number:04}" for number in range(1, self.hosts + 1))


def written(value: Any) -> str:
    """Return the Python that makes a plan, without what is as it is by default."""
    if not isinstance(value, (Plan, Script, Fault)):
        if isinstance(value, tuple):
            return "(" + "".join(f"{written(one)}, " for one in value) + ")"
        return repr(value)
    default = value._field_defaults
    fields = [
        f"{name}={written(field)}"
        for name, field in value._asdict().items()
        if name not in default or field != default[name]
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


def read(text: str) -> Plan:
    """Return the plan that `written` has made a text of."""
    names = {one.__name__: one for one in (Plan, Script, Fault, What, AtStop, AtBreak)}
    plan = eval(text, {"__builtins__": {}}, names)  # what a person types, or a test has printed
    assert isinstance(plan, Plan)
    return plan
