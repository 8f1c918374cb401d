"""Looks at this host: all facts, within a minute or so, whatever hangs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.child import Answer, Child
from launcher.doctor import look_job, look_machine, look_network, tasks
from launcher.doctor.facts import DeviceFacts, Facts, JobFacts, NetworkFacts, TorchFacts
from launcher.job import resources
from launcher.job.plan import AGENT, LaunchPlan
from launcher.job.prepare import Prepared
from launcher.log import kept
from launcher.signals import Signals

# Seconds. The first import of torch from a new disk can take most of a minute.
_FOR_DEVICES, _FOR_JOB, _FOR_NETWORK, _FOR_TORCH = 15, 20, 10, 60
_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")


def look(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Facts:
    """Return what was seen, with what a job would log. Raises tasks.Stopped."""
    with kept() as said:
        facts = _look(argv, environ, signals)
    return facts._replace(job=facts.job._replace(said=(*said, *facts.job.said)))


def _look(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Facts:
    running = tasks.Tasks(signals)
    with contextlib.ExitStack() as stack:

        def ask(name: str, seconds: float, *command: str) -> None:
            child = Child(command, environ)
            stack.callback(child.kill)  # if it has not ended
            running.start(name, functools.partial(child.answer, seconds))

        nvidia_smi = shutil.which("nvidia-smi", path=environ.get("PATH"))
        if nvidia_smi:
            ask("nvidia-smi", _FOR_DEVICES, nvidia_smi, *_QUERY)
            running.wait(["nvidia-smi"], _FOR_DEVICES + 2)
        devices = _devices(running.result("nvidia-smi", None))
        job, prepared = _job(running, argv, environ, devices)
        ask("torch", _FOR_TORCH, sys.executable, "-c", _program(), *_torchruns_words(prepared))
        log_dir = prepared.options.log_dir if prepared else ""
        at_machine = functools.partial(
            look_machine.look_at_machine, environ, log_dir, on_sagemaker=job.on_sagemaker
        )
        running.start("network", functools.partial(_network, job, prepared, environ))
        running.start("machine", at_machine)
        # Twice: a thread that looks names up gives the names their whole time.
        running.wait(["network", "machine"], 2 * _FOR_NETWORK)
        running.wait(["torch"], _FOR_TORCH)
        return Facts(
            late=tuple(name for name in ("network", "machine") if not running.has_ended(name)),
            job=job,
            network=running.result("network", NetworkFacts()),
            devices=devices,
            torch=_torch(running.result("torch", None)),
            machine=running.result("machine", Facts().machine),
            stop=look_machine.look_above(environ),
            versions=look_machine.look_at_versions(),
        )


def _torchruns_words(prepared: Prepared | None) -> tuple[str, ...]:
    """Return the arguments of the job's torchrun if the user has some for it, which it may refuse.

    All others are the launcher's own.
    """
    if prepared is None or not isinstance(prepared.plan, LaunchPlan):
        return ()
    words = prepared.plan.argv
    return words[words.index(AGENT) + 1 :] if prepared.options.torchrun_args else ()


def _program() -> str:
    """Return the text of probe.py, wherever this package was imported from."""
    spec = importlib.util.find_spec("launcher.doctor.probe")
    source: str = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
    # `-c` puts the current folder first, where a json.py of the user's may be.
    return f"import sys\nsys.path[:] = filter(None, sys.path)\n{source}"


def _job(
    running: tasks.Tasks, argv: Sequence[str], environ: Mapping[str, str], devices: DeviceFacts
) -> tuple[JobFacts, Prepared | None]:
    if devices.problem and "SM_NUM_GPUS" not in environ:
        environ = {**environ, "SM_NUM_GPUS": "0"}  # nobody asks the driver again
    running.start("job", functools.partial(look_job.look_at_job, argv, environ))
    running.wait(["job"], _FOR_JOB)
    late = f"there was no plan after {_FOR_JOB} s: nvidia-smi or neuron-ls hangs"
    found: tuple[JobFacts, Prepared | None] = running.result("job", (JobFacts(error=late), None))
    return found


def _network(job: JobFacts, prepared: Prepared | None, environ: Mapping[str, str]) -> NetworkFacts:
    facts = NetworkFacts(
        interfaces=look_network.interfaces(),
        efa=resources.has_efa(),
        efa_plugin=look_network.efa_plugin(environ),
        locked_memory=look_network.locked_memory(),
        seconds=_FOR_NETWORK,
    )
    if prepared is None or job.nnodes < 2:
        return facts
    asked = dict.fromkeys((job.hosts[0], job.current_host, *job.hosts))
    names = look_network.look_up_all(list(asked), prepared.cluster.address, _FOR_NETWORK)
    rdzv = not environ.get("PET_RDZV_ENDPOINT") or "rdzv_port" in prepared.options.given
    if job.is_first:
        own = prepared.cluster.address(job.current_host)
        ports = look_network.ports_here(own, prepared.options, rdzv=rdzv)
    else:
        ports = look_network.ports_there(names[0].addresses or (), prepared.options, rdzv=rdzv)
    return facts._replace(names=names, ports=ports if job.is_first or names[0].addresses else ())


def _devices(answer: Answer | None) -> DeviceFacts:
    if answer is None:
        return DeviceFacts()
    if answer.problem:
        why = (answer.err or answer.out).strip().partition("\n")[0]
        problem = f"nvidia-smi: {answer.problem}{why and f' ({why})'}"
        return DeviceFacts(problem=problem, is_seen=look_machine.sees_gpu())
    rows = [line.rpartition(", ") for line in answer.out.splitlines() if ", " in line]
    return DeviceFacts(
        gpus=tuple(name for name, _, _ in rows), driver=rows[0][2].strip() if rows else ""
    )


def _torch(answer: Answer | None) -> TorchFacts:
    if answer is None:
        return TorchFacts()
    seen: dict[str, Any] = {}
    for line in answer.out.splitlines():
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            seen.update(said if isinstance(said, dict) else {})
    fields = {name: value for name, value in seen.items() if name in TorchFacts._fields}
    if "backends" in fields:
        fields["backends"] = tuple(fields["backends"])
    if answer.problem and not seen.get("problem"):
        last = answer.err.strip().rpartition("\n")[2]
        fields.update(
            problem=f"{answer.problem}{last and f' ({last})'}",
            was_started=answer.was_started,
            is_late=answer.is_late,
        )
    return TorchFacts(**fields)
