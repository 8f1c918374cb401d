"""Who else connects to the first host's port: port scanners, other jobs, and impostors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.peers import agreement
from launcher.peers.events import Connected
from simulation.launcher import FINGERPRINT, PORT
from simulation.machine import Machine
from simulation.network import End

if TYPE_CHECKING:
    from simulation.job import Job


def says(kind: int, names: tuple[str, ...], host: str) -> tuple[Mapping[str, Any], ...]:
    """Return what a stranger of a kind says; from IMPOSTORS on it knows the job's hosts."""
    fingerprint = agreement.job_of(host, names, "job", PORT, 60, FINGERPRINT).fingerprint
    hello = {"hello": {"job": "job", "host": host, "fingerprint": fingerprint}}
    failure = {"cause": "OWN", "exit_code": 1, "text": "\x1b[31mforged\n"}
    kinds: tuple[tuple[Mapping[str, Any], ...], ...] = (
        (),  # many at once, which say nothing
        (),
        ({"hello": 3},),
        ({"GET": "/"}, {"stop": 15}),
        ({"hello": {"job": "another", "host": host, "fingerprint": fingerprint}},),
        ({"hello": {"job": "job", "host": "nobody", "fingerprint": fingerprint}}, {"done": True}),
        ({"result": {"exit_code": 0, "text": "", "stop_signal": 0}},),
        (hello,),
        (hello, {"failure": failure}),
        (hello, {"stop": 15}),
        (hello, {"succeeded": True}),
        ({"hello": {"job": "job", "host": host, "fingerprint": {}}},),
        (hello, {"failure": {**failure, "exit_code": 0}}, {"stop": 9}, {"succeeded": 1}, {}),
    )
    return kinds[kind % len(kinds)]


IMPOSTORS = 7
KINDS = 13


class Stranger:
    """One connection of somebody who is none of the job's launchers."""

    def __init__(self, job: Job, kind: int, host: Machine) -> None:
        self.machine = Machine(job, 0)
        self.machine.name = "stranger"
        self.ends: dict[int, End] = {}
        end = job.network.connect(self)
        if isinstance(end, End):
            for message in says(kind, job.names, host.name):
                end.send(message)
            if kind % 3 == 1:
                job.clock.after(1, end.close)

    def hear_channel(self, event: Any) -> None:
        """Care for nothing that is said."""
        assert not isinstance(event, Connected)
