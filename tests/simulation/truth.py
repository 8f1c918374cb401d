"""Whether a result tells the truth: what it names is what the plan broke."""

from __future__ import annotations

import re

from launcher.job.plan import COMPILE
from launcher.result.causes import Result
from simulation.facts import (
    HANGS,
    HELD,
    KEEPERS,
    LOSSES,
    OF_TORCHRUN,
    PAUSES,
    RANK_FAILURES,
    SLOW,
    STOPS,
    has,
    lost,
    planned,
)
from simulation.plan import What
from simulation.watch import Happened, Watch

LATE = (What.HOST_LATE, What.HOST_ABSENT, What.PORT_TAKEN, What.LAUNCHER_FAILS, *SLOW, *LOSSES)
# What a message names, and what the plan has then.
WORDS = {
    "differ in": (What.DIFFERS,),
    "there is none": (What.CANNOT_START,),
    "did not report why": (What.CANNOT_START,),
    "cannot execute": (What.NO_TORCHRUN,),
    "files open": (What.TOO_FEW_FILES,),
    "cannot listen": (What.PORT_TAKEN,),
    "cannot create a folder": (What.NO_FOLDER,),
    "the launcher itself failed": (What.LAUNCHER_FAILS,),
    "the device is gone": (What.TORCHRUN_FAILS,),
    **dict.fromkeys(("did not join", "could not be reached"), LATE),
}


def line_of_failure(result: Result) -> str:
    """Return the line of the failure itself; which rank had ended before comes first."""
    return next(line for line in result.text.splitlines() if " with exit code 0" not in line)


def is_true(watch: Watch, result: Result) -> bool:
    """Tell whether the plan broke what a result names."""
    line = line_of_failure(result)
    rank = re.match(r"(\S+), rank (\d+) ", line)
    if rank and "its keeper was killed" not in line and "below torchrun was killed" not in line:
        return _failed(watch, rank.group(1), int(rank.group(2)), line, result.exit_code)
    host = re.split("[:, ]", line)[0]
    if line.startswith("ranks have made no progress for"):
        return bool(has(watch, What.HANGS, *HELD))
    if "within" in line and "of the restart" in line:
        return bool(watch.restarts)
    if "was not completed, or a host was lost" in line:
        return bool(watch.faults)
    if "was lost" in line:
        return planned(watch, *PAUSES) or _was_lost(watch, host)
    if "SignalException" in line:
        return any(one.machine.name == host for one in has(watch, What.TORCHRUN_TOLD))
    if "its keeper was killed" in line or "below torchrun was killed" in line:
        killed = has(watch, *KEEPERS, What.TORCHRUN_TOLD)
        return any(one.machine.name == host for one in killed)
    failed = f"{COMPILE} failed" in line or ("torchrun failed" in line and "device" not in line)
    if " was killed by " in line or "has not started all" in line or failed:
        whose = (*OF_TORCHRUN, What.RUNNER_FAILS, What.LAUNCHER_FAILS)
        # One that hangs at the rendezvous has the others' time out.
        odd = planned(watch, *SLOW, What.STARTS_SLOWLY) or has(watch, *HANGS) or lost(watch)
        found = [one.machine.name for one in has(watch, *whose)]
        anywhere = COMPILE in line or "it ended during a restart" in line
        return bool(odd or host in found or (found and anywhere))
    return any(word in line and planned(watch, *kinds) for word, kinds in WORDS.items())


def _was_lost(watch: Watch, host: str) -> bool:
    """Tell whether a host was lost, or another one which could not tell which of both it was."""
    first, away = watch.job.machines[0], lost(watch)
    both = first in away or (host == first.name and bool(away))
    return both or any(machine.name == host for machine in away)


def _failed(watch: Watch, host: str, number: int, line: str, code: int) -> bool:
    """Tell whether a rank failed for a reason of its own, or no such reason can be known."""
    own = _own_failures(watch)
    if "ended with exit code" in line and planned(watch, *SLOW) and has(watch, *STOPS):
        return True  # a stop comes before what ranks have said to a launcher that stood still
    if "Connection closed by peer" not in line and "SIGABRT" not in line:
        names = [(one.machine.name, one.rank.rank) for one in own if one.rank]
        told = zip(own, names)
        return any(name == (host, number) and code in exit_codes(watch, one) for one, name in told)
    unknown = lost(watch) or planned(watch, *SLOW, *OF_TORCHRUN)
    if unknown or watch.job.plan.max_restarts or not own:
        return True
    broken_at = min(one.time for one in (*own, *has(watch, What.LEAVES)))
    return not any(_can_tell(watch, one, broken_at) for one in own)


def _own_failures(watch: Watch) -> list[Happened]:
    """Return the faults that have ended ranks."""
    return [one for one in has(watch, *RANK_FAILURES) if one.rank]


def _can_tell(watch: Watch, one: Happened, broken_at: float) -> bool:
    """Tell whether a rank says why it fails while a better cause than an echo is waited for."""
    # Of one host's the first is told first, and when it is certain.
    of_host = [other for other in _own_failures(watch) if other.machine is one.machine]
    at = max(_certain_at(other) for other in of_host if _said_at(other) <= _said_at(one))
    # What a rank says once it was told to stop is not told to the first host.
    stopped = any(stop.time < at + 0.1 for stop in has(watch, *STOPS))
    # Nor does it say a thing while the kernel holds it.
    stuck = [other.time for other in has(watch, What.STUCK) if other.rank is one.rank]
    held = any(one.time <= since <= _said_at(one) for since in stuck)
    in_time = at < broken_at + 2.9 and not stopped and not held
    return in_time and one.fault.what is not What.FORGIVEN


def _said_at(one: Happened) -> float:
    """Return when a rank says why it fails, or just ends."""
    return one.time + (one.fault.amount if one.fault.what is What.RAISES else 0.0)


def _certain_at(one: Happened) -> float:
    """Return when it is certain how a rank fails."""
    lingers = one.fault.what in (What.HOOK, What.LINGERS, What.FORGIVEN)
    return _said_at(one) + (min(one.fault.amount, 2.5) if lingers else 0.0)


def exit_codes(watch: Watch, one: Happened) -> tuple[int, ...]:
    """Return with what a job may end whose cause is a rank that was broken so."""
    assert one.rank
    code = one.rank.exit_code or 0
    real = code if code >= 0 else 128 - code
    # What takes its time, or is ended meanwhile, is told with the code that it said.
    slow = one.fault.amount > 2 or bool(one.rank.heard)
    slow = slow or planned(watch, *SLOW, *OF_TORCHRUN)  # at whose end what ranks have said counts
    said = 3 if one.fault.what is What.EXITS else 1
    return (said, real) if slow else (real,)
