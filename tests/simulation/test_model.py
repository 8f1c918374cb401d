"""The model is true: small jobs run with real launchers, torchruns and ranks, and simulated ones.

Both give the same result, and to each rank and each torchrun happens the same in the same order.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import more, ports

from simulation.job import Job
from simulation.lives import Lives
from simulation.plan import AtBreak, AtStop, Fault, Plan, Script, What, written
from simulation.real_rank import TRAINS_FROM

HERE = Path(__file__).parent
STOP, KILL = signal.SIGTERM, signal.SIGKILL

# A busy machine may delay real processes for seconds: ranks that something is to end would run for
# a minute, and no grace ends before they do, but of those that ignore a stop.
DIES = Script(60, AtStop.DIES, at_break=AtBreak.GOES_ON)
SAVES = Script(60, AtStop.SAVES, save=0.5, save_code=143, at_break=AtBreak.GOES_ON)
IGNORES = Script(60, AtStop.IGNORES, at_break=AtBreak.GOES_ON)
SUCCEEDS = Script(3, AtStop.DIES, at_break=AtBreak.GOES_ON)
ONE = Plan(hosts=1, nproc=2, grace=30, failure_grace=30)
TWO = ONE._replace(hosts=2, nproc=1)

SCENARIOS = {
    "all succeed": ONE._replace(script=SUCCEEDS),
    "a rank raises, and the other one saves": ONE._replace(
        script=SAVES, faults=(Fault(What.RAISES, 3.0, local_rank=1),)
    ),
    "a rank exits, and the other one has to be killed": ONE._replace(
        script=IGNORES, failure_grace=1, faults=(Fault(What.EXITS, 3.0),)
    ),
    "a rank is killed, and the other one dies of SIGTERM": ONE._replace(
        script=DIES, faults=(Fault(What.KILLED, 3.0),)
    ),
    "a rank's hook chooses its exit code": ONE._replace(
        script=DIES, faults=(Fault(What.HOOK, 3.0, amount=0.5),)
    ),
    "a rank's hook ends it with 0": ONE._replace(
        script=SUCCEEDS, faults=(Fault(What.FORGIVEN, 3.0, amount=0.1),)
    ),
    "a rank leaves the other one, which fails of it": ONE._replace(
        script=SAVES._replace(at_break=AtBreak.EXITS),
        faults=(Fault(What.LEAVES, 3.0, local_rank=1),),
    ),
    "a rank cleans up, and the other one fails of it before": ONE._replace(
        script=SAVES._replace(at_break=AtBreak.EXITS),
        faults=(Fault(What.RAISES, 3.0, amount=4.0),),
        seed=2,
    ),
    "a rank ends, and both are restarted": ONE._replace(
        script=SUCCEEDS, max_restarts=1, faults=(Fault(What.ENDS, 3.0),)
    ),
    "a stop, and ranks that save": ONE._replace(script=SAVES, faults=(Fault(What.STOP, 3.0),)),
    "a stop, and ranks that die of it": ONE._replace(script=DIES, faults=(Fault(What.STOP, 3.0),)),
    "Ctrl-C three times": ONE._replace(script=IGNORES, faults=(Fault(What.CTRL_C_THRICE, 3.0),)),
    "a rank of another host raises": TWO._replace(
        script=SAVES, faults=(Fault(What.RAISES, 3.0, host=1),)
    ),
    "a stop of one host of two": TWO._replace(
        script=SAVES, faults=(Fault(What.STOP, 3.0, host=1),)
    ),
    "what torchrun has started is killed": TWO._replace(
        script=SAVES, faults=(Fault(What.STUB_KILLED, 3.0, host=1),)
    ),
    "a keeper is killed": ONE._replace(script=SAVES, faults=(Fault(What.KEEPER_KILLED, 3.0),)),
    "torchrun is killed": TWO._replace(
        script=SAVES, faults=(Fault(What.TORCHRUN_KILLED, 3.0, host=1),)
    ),
    "the launcher of another host is killed": TWO._replace(
        script=SAVES, faults=(Fault(What.LAUNCHER_KILLED, 3.0, host=1),)
    ),
    "the first host's launcher is killed": TWO._replace(
        script=SAVES, faults=(Fault(What.LAUNCHER_KILLED, 3.0),)
    ),
    "the ranks of two hosts are restarted": TWO._replace(
        script=SUCCEEDS, max_restarts=1, faults=(Fault(What.ENDS, 3.0, host=1),)
    ),
    "one host is through before the other": TWO._replace(
        script=SUCCEEDS, faults=(Fault(What.HOST_SLOW, host=1, amount=3.0),)
    ),
}
# For `make matrix`.
SECOND_OF_THEIR_KIND = (
    "all succeed",
    "a rank exits, and the other one has to be killed",
    "a rank is killed, and the other one dies of SIGTERM",
    "a rank's hook chooses its exit code",
    "Ctrl-C three times",
    "the launcher of another host is killed",
)


def simulated(plan: Plan) -> list[tuple[Any, Lives]]:
    """Run a plan in the simulator; return the exit code, and what was heard, of each host."""
    watch = Job(plan, trace=True).run()
    found = []
    for machine in watch.job.machines:
        launcher = machine.launcher
        assert launcher
        code = launcher.result.exit_code if launcher.result else None
        found.append((code, Lives(watch.events[machine.name])))
    return found


def real(plan: Plan, start: Any, tmp_path: Path) -> list[tuple[Any, Lives]]:
    """Run a plan with real launchers, torchruns and ranks."""
    shared = tmp_path / "shared"
    shared.mkdir()
    names = ["127.0.0.1", "127.0.0.2"][: plan.hosts]
    common = {
        "SM_HOSTS": str(names).replace("'", '"'),
        "SM_NUM_GPUS": "0",
        "TRAINING_JOB_NAME": "real",
        "LAUNCHER_NPROC_PER_NODE": str(plan.nproc),
        "LAUNCHER_MAX_RESTARTS": str(plan.max_restarts),
        "LAUNCHER_GRACE": str(int(plan.grace)),
        "LAUNCHER_FAILURE_GRACE": str(int(plan.failure_grace)),
        "LAUNCHER_START": "cold",
        **ports(),
    }
    arguments = ("--train-script", HERE / "real_rank.py", shared, written(plan))
    hosts = []
    for name in names:
        command = [sys.executable, str(HERE / "real_launcher.py"), str(tmp_path / name)]
        environment = {**common, "SM_CURRENT_HOST": name}
        hosts.append(start(*arguments, host=name, command=command, **environment))
    for host in hosts:
        host.wait_for("training", plan.nproc)
    time.sleep(0.5)
    for fault in plan.faults:
        happens(fault, hosts[fault.host])
    found = []
    for host in hosts:
        code = host.wait()
        with open(tmp_path / host.name, "rb") as file:
            killed = host.process.returncode == -KILL
            found.append((None if killed else code, Lives(events(file))))
    return found


def happens(fault: Fault, host: Any) -> None:
    """Do what the ranks do not do themselves."""
    if fault.what is What.STOP:
        host.signal(STOP)
    elif fault.what is What.CTRL_C_THRICE:
        for _ in range(3):
            host.signal(signal.SIGINT)
            time.sleep(0.3)
    elif fault.what is What.LAUNCHER_KILLED:
        host.signal(KILL)
    elif fault.what is What.TORCHRUN_KILLED:
        host.torchrun.kill()
    elif fault.what is What.STUB_KILLED:
        host.stubs[fault.local_rank].kill()
    elif fault.what is What.KEEPER_KILLED:
        host.keepers[fault.local_rank].kill()


def events(file: Any) -> list[tuple[Any, str]]:
    """Return what a real launcher has written."""
    found = []
    while True:
        try:
            found.append(pickle.load(file))
        except EOFError:
            return found


@pytest.mark.torch
@pytest.mark.parametrize(
    "scenario",
    [more(name) if name in SECOND_OF_THEIR_KIND else name for name in SCENARIOS],
)
def test_simulated_jobs_are_as_real_ones(scenario: str, start: Any, tmp_path: Path) -> None:
    plan = SCENARIOS[scenario]
    assert min([fault.at for fault in plan.faults if fault.at] or [3.0]) >= TRAINS_FROM
    for (is_real, lives), (is_simulated, model) in zip(
        real(plan, start, tmp_path), simulated(plan)
    ):
        assert lives.of == model.of
        assert is_real == is_simulated
