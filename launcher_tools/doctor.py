"""`sm-launch doctor`: what the launcher sees on this host, and whether a job would run.

A check is a function that looks at one thing and yields what it finds; they are in
doctor_network.py, doctor_machine.py, doctor_stop.py and doctor_job.py. Here are their order and the
report, and nothing that hangs can hold them up, or a stop.
"""

from __future__ import annotations

import importlib.util
import json
import select
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Callable, TypeVar

from launcher import __version__
from launcher.errors import STOPS
from launcher.host.child import Answer, Child
from launcher.host.signals import Signals
from launcher.job import arguments
from launcher.result.causes import PROBLEMS, SUCCESS, Result, stopped
from launcher.result.failure import write_failure
from launcher.text.log import kept, log, show
from launcher.text.words import plural, printable, signal_name
from launcher_tools import doctor_job, doctor_machine, doctor_network, doctor_stop
from launcher_tools.doctor_job import (
    DRIVER_SECONDS,
    HOST_SECONDS,
    PLAN_SECONDS,
    PROBLEM,
    TORCH_SECONDS,
    WARNING,
    PlannedJob,
    ReportLine,
    ok,
    warning,
)

_T = TypeVar("_T")
_U = TypeVar("_U")
_POLL_SECONDS = 0.02
_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
_NO_PLAN = f"the job could not be planned within {PLAN_SECONDS} s: nvidia-smi or neuron-ls hangs"
_NO_NETWORK = warning(
    "names",
    "names and ports could not be checked in time",
    "check this container's DNS, and run doctor again",
)
_NO_DISK = warning(
    "disk",
    "folders and limits could not be checked in time: a file system hangs",
    "check what is mounted here (FSx, EFS, S3)",
)
_HELP = """\
usage: sm-launch doctor [--json] [JOB ARGUMENT ...]

Report what the launcher finds on this host, and whether a job would run. Each line is marked ok,
warning or problem, and says what to do. With a job's arguments and options, that job is checked;
without a script or module, only the host is. No part of the job is started.

  --json  print one JSON object instead of the table; must be the first argument

Exit codes: 0 if a job would run, with or without warnings; 2 if it would fail."""


def run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Look at this host, and report; return 2 as the exit code if a job would fail."""
    if arguments.wants_help(argv):
        show(_HELP)
        return SUCCESS
    is_json = argv[:1] == ["--json"]
    try:
        with kept() as said:  # a job would log it; here it is in the report
            job, findings = _check(argv[1:] if is_json else argv, environ, signals, said)
    except Stopped as stop:
        log(f"{signal_name(stop.number)}: stopping doctor.")
        return stopped(stop.number)
    show((as_json if is_json else as_text)(job, findings))
    if not _problems(findings):
        return SUCCESS
    write_failure(as_failure(findings), environ, quiet=True)
    return PROBLEMS


def _check(
    argv: Sequence[str], environ: Mapping[str, str], signals: Signals, said: Sequence[str]
) -> tuple[PlannedJob, list[ReportLine]]:
    """Return the job and all that is found, in the order of the report. Raises Stopped."""
    driver = None
    nvidia_smi = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if nvidia_smi:
        driver = _ask((nvidia_smi, *_QUERY), environ, DRIVER_SECONDS, signals)
    planned = in_thread(doctor_job.plan_job, argv, _for_plan(environ, driver))
    job = result(planned, PlannedJob(error=_NO_PLAN), time.monotonic() + PLAN_SECONDS, signals)
    if not job.takes_part:
        return job, [ok("job", "this host is in none of the instance groups that run the job")]
    deadline = time.monotonic() + HOST_SECONDS
    network = in_thread(doctor_network.check, job, environ)
    machine = in_thread(doctor_machine.check, job, environ)
    command = (sys.executable, "-c", _probe(), *job.words_for_torchrun())
    torch = doctor_machine.read_torch(_ask(command, environ, TORCH_SECONDS, signals))
    return job, [
        *result(network, [_NO_NETWORK] if job.cluster.hosts else [], deadline, signals),
        *doctor_machine.devices(job, driver, torch),
        *doctor_machine.torch(job, torch),
        *result(machine, [_NO_DISK], deadline, signals),
        *doctor_stop.stop(environ),
        *doctor_job.settings(job, environ, said),
        *doctor_job.plan(job, torch.refused),
    ]


def _ask(
    command: Sequence[str], environ: Mapping[str, str], seconds: float, signals: Signals
) -> Answer:
    """Return what a command says; kill it at its limit, or at a stop. Raises Stopped."""
    answer = Child(command, environ).answer(seconds, signals)
    if answer.was_stopped:
        raise Stopped(signals.stop())
    return answer


def _for_plan(environ: Mapping[str, str], driver: Answer | None) -> Mapping[str, str]:
    if driver and driver.problem and "SM_NUM_GPUS" not in environ:
        return {**environ, "SM_NUM_GPUS": "0"}  # nobody asks the driver again
    return environ


def _probe() -> str:
    """Return the text of doctor_probe.py, wherever this package was imported from."""
    spec = importlib.util.find_spec("launcher_tools.doctor_probe")
    source: str = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
    # `-c` puts the current folder first, where a json.py of the user's may be.
    return f"import sys\nsys.path[:] = filter(None, sys.path)\n{source}"


class Stopped(Exception):
    """A stop came; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def in_thread(function: Callable[..., _T], *args: Any) -> Future[_T]:
    """Start a function in a thread of its own, which ends with this process at the latest."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # this container has no more threads
        run()
    return future


def result(future: Future[_T], otherwise: _U, deadline: float, signals: Signals) -> _T | _U:
    """Return what a function has returned by then, or else `otherwise`. Raises Stopped."""
    while not future.done() and time.monotonic() < deadline:
        select.select([signals], [], [], _POLL_SECONDS)
        for number in signals.take():
            if number in STOPS:
                raise Stopped(number)
    return future.result() if future.done() else otherwise


# The report


def as_text(job: PlannedJob, findings: Sequence[ReportLine]) -> str:
    """Return three columns: how it is, what was checked, what was seen; below it what to do."""
    lines = []
    for check, level, seen, to_do in findings:
        lines.append(f"{level:8} {check:10} {printable(seen)}")
        if to_do:
            lines.append(f"{'':8} {'':10} -> {printable(to_do)}")
    return "\n".join([*lines, _verdict(job, findings)])


def _problems(findings: Sequence[ReportLine]) -> list[ReportLine]:
    return [finding for finding in findings if finding.level == PROBLEM]


def _verdict(job: PlannedJob, findings: Sequence[ReportLine]) -> str:
    wrong = len(_problems(findings))
    warnings = sum(finding.level == WARNING for finding in findings)
    more = f"; {plural(warnings, 'warning')}" if warnings else ""
    where = f" on {job.cluster.current_host}" if job.cluster.nnodes > 1 else ""
    if wrong:
        return f"A job would fail{where}: {plural(wrong, 'problem')}{more}."
    if not job.takes_part:
        return f"This host would not run any part of the job{more}."
    return f"A job would run{where}{more}."


def as_json(job: PlannedJob, findings: Sequence[ReportLine]) -> str:
    """Return one JSON object; docs/development/tools.md describes it."""
    report = {
        "launcher": __version__,
        "host": job.cluster.current_host,
        "hosts": job.cluster.nnodes,
        "would_run": not _problems(findings),
        "findings": [
            {"check": check, "level": level, "seen": seen, "to_do": to_do}
            for check, level, seen, to_do in findings
        ],
    }
    return json.dumps(report, indent=1)


def as_failure(findings: Sequence[ReportLine]) -> str:
    """Return the problems as SageMaker's failure reason."""
    lines = [
        f"{check}: {printable('; '.join(filter(None, [seen, to_do])))}"
        for check, _, seen, to_do in _problems(findings)
    ]
    return "".join(f"{line}\n" for line in ["launcher: doctor: a job would fail", *lines])
