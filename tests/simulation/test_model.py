"""The model is true: small jobs run with real launchers, torchruns and ranks, and simulated ones.

Both give the same result, and to each rank and each torchrun happens the same in the same order.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import more

from simulation.job import Job
from simulation.lives import lives
from simulation.plan import Plan, What, written
from simulation.planting import HERE, cases
from simulation.real_rank import TRAINS_FROM

SCENARIOS = {case.what: case.plan for case in cases(HERE / "real.txt")}
# For `make matrix`.
SECOND_OF_THEIR_KIND = ("a rank exits, and the other one has to be killed", "Ctrl-C three times")


def simulated(plan: Plan) -> list[tuple[Any, Any]]:
    """Run a plan in the simulator; return the exit code, and what was heard, of each host."""
    watch = Job(plan, trace=True).run()
    found = []
    for one in watch.job.machines:
        log = "\n".join(line for line in watch.trace or () if f" {one.name} " in line)
        end = one.launcher and one.launcher.result
        found.append((end and end.exit_code, lives(log)))
    return found


def real(plan: Plan, start_two: Any, tmp_path: Path) -> list[tuple[Any, Any]]:
    """Run a plan with real launchers, torchruns and ranks."""
    shared = tmp_path / "shared"
    shared.mkdir()
    options = {
        "LAUNCHER_NPROC_PER_NODE": str(plan.nproc),
        "LAUNCHER_MAX_RESTARTS": str(plan.max_restarts),
        "LAUNCHER_GRACE": str(int(plan.grace)),
        "LAUNCHER_FAILURE_GRACE": str(int(plan.failure_grace)),
        "LAUNCHER_START": "cold",
        "LAUNCHER_VERBOSE": "true",
    }
    arguments = ("--train-script", HERE / "real_rank.py", shared, written(plan))
    hosts = start_two(*arguments, count=plan.hosts, **options)
    for host in hosts:
        host.wait_for("training", plan.nproc)
    for fault in plan.faults:
        if fault.what in ACTS:
            ACTS[fault.what](hosts[fault.host])
    found = []
    for host in hosts:
        code = host.wait()
        killed = host.process.returncode == -signal.SIGKILL
        found.append((None if killed else code, lives(host.err)))
    return found


def interrupt(host: Any) -> None:
    """Send Ctrl-C three times."""
    for _ in range(3):
        host.signal(signal.SIGINT)
        time.sleep(0.3)


# What the ranks do not do themselves.
ACTS: dict[What, Callable[[Any], None]] = {
    What.STOP: lambda host: host.signal(signal.SIGTERM),
    What.CTRL_C_THRICE: interrupt,
    What.LAUNCHER_KILLED: lambda host: host.signal(signal.SIGKILL),
    What.TORCHRUN_KILLED: lambda host: host.torchrun.kill(),
    What.TORCHRUN_TOLD: lambda host: host.torchrun.terminate(),
    What.STUB_KILLED: lambda host: host.stubs[0].kill(),
    What.KEEPER_KILLED: lambda host: host.keepers[0].kill(),
}


@pytest.mark.torch
@pytest.mark.parametrize(
    "scenario", [more(n) if n in SECOND_OF_THEIR_KIND else n for n in SCENARIOS]
)
def test_simulated_jobs_are_as_real_ones(scenario: str, start_two: Any, tmp_path: Path) -> None:
    plan = SCENARIOS[scenario]
    assert min([fault.at for fault in plan.faults if fault.at] or [3.0]) >= TRAINS_FROM
    assert real(plan, start_two, tmp_path) == simulated(plan)
