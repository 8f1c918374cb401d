"""Whether a result tells the truth: what it names is what the plan broke."""

from __future__ import annotations

import re

from launcher.job.plan import COMPILE
from launcher.result.causes import Result
from simulation import faults
from simulation.facts import has, lost, planned
from simulation.faults import FAILURES, SLOW, STOPS, What
from simulation.watch import Happened, Watch

# What a first line says that names no rank; what the plan has then of the host at its begin,
# or of any host.
OF_TORCHRUN = (*faults.TORCHRUNS, What.RUNNER_FAILS, What.LAUNCHER_FAILS)
OFTEN = (*SLOW, What.STARTS_SLOWLY, *faults.HANGS, *faults.LOSSES, What.CTRL_C_THRICE)
NAMES: tuple[tuple[str, tuple[What, ...], tuple[What, ...]], ...] = (
    ("ranks have made no progress for", (), (What.HANGS, *faults.HELD)),
    ("was lost", (*faults.LOSSES, What.CTRL_C_THRICE), faults.PAUSES),
    ("torchrun was ended by|it was sent a signal, or ends by itself", (What.TORCHRUN_TOLD,), ()),
    ("its keeper was killed|below torchrun was killed", faults.KEEPERS, ()),
    ("the device is gone", (), (What.TORCHRUN_FAILS,)),
    (COMPILE, (), (*OF_TORCHRUN, *OFTEN)),
    (" was killed by |has not started all|torchrun failed", OF_TORCHRUN, OFTEN),
    ("differ in", (), (What.DIFFERS,)),
    ("there is none|did not report why", (), (What.CANNOT_START,)),
    ("cannot execute", (), (What.NO_TORCHRUN,)),
    ("cannot listen", (), (What.PORT_TAKEN,)),
    ("cannot create a folder", (), (What.NO_FOLDER,)),
    ("the launcher itself failed", (), (What.LAUNCHER_FAILS,)),
    ("did not join|could not be reached", (), (
        What.HOST_LATE, What.HOST_ABSENT, What.PORT_TAKEN, What.LAUNCHER_FAILS, *SLOW,
        *faults.LOSSES)),
)  # fmt: skip


def line_of_failure(result: Result) -> str:
    """Return the line of the failure itself; which rank had ended before comes first."""
    lines = result.text.splitlines()
    return next(
        line for line in lines if not re.search("(had ended|ending) with exit code 0", line)
    )


def is_true(watch: Watch, result: Result) -> bool:
    """Tell whether the plan broke what a result names."""
    line = line_of_failure(result)
    rank = re.match(r"(\S+), rank (\d+) (?!.*(its keeper|below torchrun) was killed)", line)
    if rank:
        return _failed(watch, rank[1], int(rank[2]), line, result.exit_code)
    if "was not completed, or a host was lost" in line:
        return bool(watch.faults)
    if "within" in line and "of the restart" in line:
        return bool(watch.restarts)
    host, first = re.split("[:, ]", line)[0], watch.job.names[0]
    if "it was sent a signal, or ends by itself" in line and planned(watch, What.KEEPER_HANGS):
        # A keeper that is stopped cannot tell that its stub was killed: torchrun just ends. If its
        # launcher stands still, other hosts' torchruns are heard first.
        slow = {watch.job.names[one.host] for one in watch.job.plan.faults if one.what in SLOW}
        if {one.machine.name for one in has(watch, What.STUB_KILLED)} & {host, *slow}:
            return True
    for words, of_host, of_any in NAMES:
        if re.search(words, line):
            hosts = {
                watch.job.names[one.host] for one in watch.job.plan.faults if one.what in of_host
            }
            # A host that has lost the first cannot tell which of both is lost.
            is_either = words == "was lost" and (first in hosts or (host == first and bool(hosts)))
            return host in hosts or is_either or planned(watch, *of_any)
    return False


def _failed(watch: Watch, host: str, number: int, line: str, code: int) -> bool:
    """Tell whether a rank failed for a reason of its own, or no such reason can be known."""
    own = [one for one in has(watch, *FAILURES) if one.rank]
    if "ended with exit code" in line and planned(watch, *SLOW) and has(watch, *STOPS):
        return True  # a stop comes before what ranks have said to a launcher that stood still
    if "Connection closed by peer" not in line and "SIGABRT" not in line:
        of_it = [one for one in own if one.rank and one.rank.rank == number]
        named = [one for one in of_it if one.machine.name == host]
        return any(code in exit_codes(watch, one) for one in named)
    if lost(watch) or planned(watch, *SLOW, *faults.TORCHRUNS) or watch.job.plan.max_restarts:
        return True
    broken_at = min([one.time for one in (*own, *has(watch, What.LEAVES))], default=0.0)
    return not any(_can_tell(watch, one, own, broken_at) for one in own)


def _can_tell(watch: Watch, one: Happened, own: list[Happened], broken_at: float) -> bool:
    """Tell whether a rank says why it fails while a better cause than an echo is waited for."""
    # Of one host's the first is told first, and when it is certain.
    of_host = [other for other in own if other.machine is one.machine]
    at = max(_certain_at(other) for other in of_host if said_at(other) <= said_at(one))
    # What a rank says once it was told to stop is not told to the first host.
    stopped = any(stop.time < at + 0.1 for stop in has(watch, *STOPS))
    # Nor does it say a thing while the kernel holds it.
    stuck = [other.time for other in has(watch, What.STUCK) if other.rank is one.rank]
    held = any(one.time <= since <= said_at(one) for since in stuck)
    in_time = at < broken_at + 2.9 and not stopped and not held
    return in_time and one.fault.what is not What.FORGIVEN


def said_at(one: Happened) -> float:
    """Return when a rank says why it fails, or just ends."""
    return one.time + (one.fault.amount if one.fault.what is What.RAISES else 0.0)


def _certain_at(one: Happened) -> float:
    """Return when it is certain how a rank fails."""
    lingers = one.fault.what in (What.HOOK, What.LINGERS, What.FORGIVEN)
    return said_at(one) + (min(one.fault.amount, 2.5) if lingers else 0.0)


def exit_codes(watch: Watch, one: Happened) -> tuple[int, ...]:
    """Return with what a job may end whose cause is a rank that was broken so."""
    assert one.rank
    code = one.rank.exit_code or 0
    real = code if code >= 0 else 128 - code
    # What takes its time, or is ended meanwhile, is told with the code that it said; so is what was
    # said before a torchrun ended.
    slow = one.fault.amount > 2 or one.rank.heard or planned(watch, *SLOW, *faults.TORCHRUNS)
    said = 3 if one.fault.what is What.EXITS else 1
    return (said, real) if slow else (real,)
