"""The model is true: small jobs run with real launchers, torchruns and ranks, and simulated ones.

Both give the same result, and to each rank and each torchrun happens the same in the same order.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import more

from simulation.job import Job
from simulation.lives import lives
from simulation.plan import AtBreak, AtStop, Fault, Plan, Script, What, written
from simulation.real_rank import TRAINS_FROM

HERE = Path(__file__).parent

# A busy machine may delay real processes for seconds: ranks that something is to end would run for
# a minute, and no grace ends before they do, but of those that ignore a stop.
DIES = Script(60, AtStop.DIES, at_break=AtBreak.GOES_ON)
SAVES = Script(60, AtStop.SAVES, save=0.5, save_code=143, at_break=AtBreak.GOES_ON)
IGNORES = Script(60, AtStop.IGNORES, at_break=AtBreak.GOES_ON)
SUCCEEDS = Script(3, AtStop.DIES, at_break=AtBreak.GOES_ON)


def one(script: Script, *faults: Fault, **other: Any) -> Plan:
    """Return a job of one host with two ranks."""
    plan = Plan(hosts=1, nproc=2, grace=30, failure_grace=30, script=script, faults=faults)
    return plan._replace(**other)


def two(script: Script, *faults: Fault, **other: Any) -> Plan:
    """Return a job of two hosts with one rank each."""
    return one(script, *faults, hosts=2, nproc=1, **other)


FAILS = SAVES._replace(at_break=AtBreak.EXITS)
SCENARIOS = {
    "a rank raises, and the other one saves": one(SAVES, Fault(What.RAISES, 3, local_rank=1)),
    "a rank exits, and the other one has to be killed": one(
        IGNORES, Fault(What.EXITS, 3), failure_grace=1
    ),
    "a rank's hook ends it with 0": one(SUCCEEDS, Fault(What.FORGIVEN, 3, amount=0.1)),
    "a rank leaves the other one, which fails of it": one(
        FAILS, Fault(What.LEAVES, 3, local_rank=1)
    ),
    "a rank cleans up, and the other one fails of it before": one(
        FAILS, Fault(What.RAISES, 3, amount=4), seed=2
    ),
    "a rank ends, and both are restarted": one(SUCCEEDS, Fault(What.ENDS, 3), max_restarts=1),
    "a stop, and ranks that save": one(SAVES, Fault(What.STOP, 3)),
    "a stop, and ranks that die of it": one(DIES, Fault(What.STOP, 3)),
    "Ctrl-C three times": one(IGNORES, Fault(What.CTRL_C_THRICE, 3)),
    "a rank of another host raises": two(SAVES, Fault(What.RAISES, 3, host=1)),
    "a stop of one host of two": two(SAVES, Fault(What.STOP, 3, host=1)),
    "what torchrun has started is killed": two(SAVES, Fault(What.STUB_KILLED, 3, host=1)),
    "a keeper is killed": one(SAVES, Fault(What.KEEPER_KILLED, 3)),
    "torchrun is killed": two(SAVES, Fault(What.TORCHRUN_KILLED, 3, host=1)),
    "the first host's launcher is killed": two(SAVES, Fault(What.LAUNCHER_KILLED, 3)),
    "the ranks of two hosts are restarted": two(
        SUCCEEDS, Fault(What.ENDS, 3, host=1), max_restarts=1
    ),
    "one host is through before the other": two(SUCCEEDS, Fault(What.HOST_SLOW, host=1, amount=3)),
}
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
        happens(fault, hosts[fault.host])
    found = []
    for host in hosts:
        code = host.wait()
        killed = host.process.returncode == -signal.SIGKILL
        found.append((None if killed else code, lives(host.err)))
    return found


def happens(fault: Fault, host: Any) -> None:
    """Do what the ranks do not do themselves."""
    if fault.what is What.STOP:
        host.signal(signal.SIGTERM)
    elif fault.what is What.CTRL_C_THRICE:
        for _ in range(3):
            host.signal(signal.SIGINT)
            time.sleep(0.3)
    elif fault.what is What.LAUNCHER_KILLED:
        host.signal(signal.SIGKILL)
    elif fault.what is What.TORCHRUN_KILLED:
        host.torchrun.kill()
    elif fault.what is What.STUB_KILLED:
        host.stubs[fault.local_rank].kill()
    elif fault.what is What.KEEPER_KILLED:
        host.keepers[fault.local_rank].kill()


@pytest.mark.torch
@pytest.mark.parametrize(
    "scenario", [more(n) if n in SECOND_OF_THEIR_KIND else n for n in SCENARIOS]
)
def test_simulated_jobs_are_as_real_ones(scenario: str, start_two: Any, tmp_path: Path) -> None:
    plan = SCENARIOS[scenario]
    assert min([fault.at for fault in plan.faults if fault.at] or [3.0]) >= TRAINS_FROM
    assert real(plan, start_two, tmp_path) == simulated(plan)
