"""Who else connects to the first host's port: port scanners, other jobs, and impostors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.job.job import LaunchPlan
from launcher.peers.messages import hello as hello_of
from launcher.peers.messages import to_wire
from launcher.text.protocol import encoded
from simulation.launcher import FINGERPRINT, job_of
from simulation.machine import Machine

if TYPE_CHECKING:
    from simulation.job import Job


def says(kind: int, job: Job, host: str) -> tuple[Mapping[str, Any], ...]:
    """Return what a stranger of a kind says; from IMPOSTORS on it knows the job's hosts."""
    true = hello_of(job_of(job, host, LaunchPlan(fingerprint=FINGERPRINT)))
    hello, fingerprint = to_wire(true), true.fingerprint
    failure = {"cause": "OWN", "exit_code": 1, "text": "\x1b[31mforged\n"}
    failure.update(may_restart=True, rank=0, broken="")
    failed = {"Failed": {"attempt": 0, "failure": failure, "age": 0.0}}
    kinds: tuple[tuple[Mapping[str, Any], ...], ...] = (
        (),  # many at once, which say nothing
        (),
        ({"Hello": 3},),
        ({"GET": "/"}, {"Stop": {"number": 15}}),
        ({"Hello": {"job": "another", "host": host, "fingerprint": fingerprint, "grace": 1.0}},),
        (
            {"Hello": {"job": "job", "host": "nobody", "fingerprint": fingerprint, "grace": 1.0}},
            {"Done": {}},
        ),
        ({"End": {"result": {"exit_code": 0, "text": "", "stop_signal": 0}}},),
        (hello,),
        (hello, failed),
        (hello, {"Stop": {"number": 15}}),
        (hello, {"Succeeded": {"attempt": 1}}, {"Cleared": {"number": 1, "survivors": 0}}),
        ({"Hello": {"job": "job", "host": host, "fingerprint": {}, "grace": 1.0}},),
        (
            hello,
            {"Failed": {**failed["Failed"], "failure": {**failure, "exit_code": 0}}},
            {"Stop": 9},
            {},
        ),
    )
    return kinds[kind % len(kinds)]


IMPOSTORS = 7
KINDS = 13


class Stranger:
    """One connection of somebody who is none of the job's launchers."""

    def __init__(self, job: Job, kind: int, host: Machine) -> None:
        machine = Machine(job, 0)
        machine.name = "stranger"
        end = job.network.connect(machine, job.random)
        if not isinstance(end, str):
            for message in says(kind, job, host.name):
                end.send(encoded(message))
            if kind % 3 == 1:
                job.clock.after(1, end.close)
