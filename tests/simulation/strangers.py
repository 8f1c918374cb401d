"""Who else connects to the first host's port: port scanners, other jobs, and impostors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.job.job import LaunchPlan
from launcher.peers.messages import hello as hello_of
from launcher.peers.messages import to_wire
from launcher.text.protocol import encoded
from simulation.faults import Fault, What
from simulation.launcher import FINGERPRINT, job_of
from simulation.machine import Machine

if TYPE_CHECKING:
    from simulation.job import Job

Says = tuple[Mapping[str, Any], ...]


def _strangers(hello: dict[str, Any]) -> tuple[Says, ...]:
    """Return what strangers say who do not know the job's hosts."""
    return (
        (),  # many at once, which say nothing
        (),
        ({"Hello": 3},),
        ({"GET": "/"}, {"Stop": {"number": 15}}),
        ({"Hello": {**hello, "job": "another"}},),
        ({"Hello": {**hello, "host": "nobody"}}, {"Done": {}}),
        ({"End": {"result": {"exit_code": 0, "text": "", "stop_signal": 0}}},),
    )


def _impostors(hello: dict[str, Any]) -> tuple[Says, ...]:
    """Return what those say who know them."""
    failure = {"cause": "OWN", "exit_code": 1, "text": "\x1b[31mforged\n"}
    failure.update(may_restart=True, rank=0, broken="")
    failed = {"attempt": 0, "failure": failure, "age": 0.0}
    true = {"Hello": hello}
    return (
        (true,),
        (true, {"Failed": failed}),
        (true, {"Stop": {"number": 15}}),
        (true, {"Succeeded": {"attempt": 1}}, {"Cleared": {"number": 1, "survivors": 0}}),
        ({"Hello": {**hello, "fingerprint": {}}},),
        (true, {"Failed": {**failed, "failure": {**failure, "exit_code": 0}}}, {"Stop": 9}, {}),
    )


def connect(job: Job, fault: Fault, host: Machine) -> None:
    """Have somebody connect who is none of the job's launchers, and perhaps hang up."""
    machine = Machine(job, 0)
    machine.name = "stranger"
    end = job.network.connect(machine)
    if isinstance(end, str):
        return
    hello = to_wire(hello_of(job_of(job, host.name, LaunchPlan(fingerprint=FINGERPRINT))))["Hello"]
    kinds = (_impostors if fault.what is What.IMPOSTOR else _strangers)(hello)
    kind = int(fault.amount)
    for message in kinds[kind % len(kinds)]:
        end.send(encoded(message))
    if kind % 3 == 1:
        job.clock.after(1, end.close)
