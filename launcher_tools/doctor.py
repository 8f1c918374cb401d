"""`sm-launch doctor`: what the launcher sees on this host, and whether a job would run.

This file has the report; doctor_checks.py has the checks, in the report's order. Each check runs in
a thread of its own, so that a hanging check holds up neither the others nor a stop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher import __version__
from launcher.errors import LaunchError, NothingToRunError
from launcher.host.signals import Signals
from launcher.job.job import Cluster, Job
from launcher.job.options import Options
from launcher.job.prepare import prepare
from launcher.result.causes import PROBLEMS, SUCCESS, Result, stopped
from launcher.result.failure import write_failure
from launcher.text.log import collected, log, show
from launcher.text.words import plural, printable, signal_name
from launcher_tools.doctor_checks import CHECKS, OK, PROBLEM, WARNING, at_once

# Stands for the script if none is named: one of Python's own modules. It is never started.
_ANY = ("--train-module", "site")
_UNKNOWN = Job(Cluster((), "", "", 0, 0, ""), Options())  # no known hosts
# For all checks together.
SECONDS = 70
HELP = """\
usage: sm-launch doctor [--json] [JOB ARGUMENT ...]

Report what the launcher finds on this host, and whether a job would run. Each line is marked ok,
warning or problem, and says what to do. With a job's arguments and options, that job is checked;
without a script or module, only the host is. No part of the job is started.

  --json  print one JSON object instead of the table; must be the first argument

Exit codes: 0 if a job would run, with or without warnings; 2 if it would fail."""


class ReportLine(NamedTuple):
    """One line of the report: a finding, with its check."""

    check: str
    level: str
    seen: str
    to_do: str = ""


_LATE = (
    WARNING,
    f"could not be checked within {SECONDS} s: a file system, a driver or DNS hangs",
    "check what is mounted here (FSx, EFS, S3), and this container's DNS",
)


def run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Check this host, and report; the exit code is 2 if a job would fail."""
    is_json = argv[:1] == ["--json"]
    with collected() as logged:  # lines that a job would log go into the report
        job, report = _report(argv[1:] if is_json else argv, environ, logged)
    if stop := signals.stop:
        log(f"{signal_name(stop)}: stopping doctor.")
        return stopped(stop)
    show((as_json if is_json else as_text)(job, report))
    if not _problems(report):
        return SUCCESS
    write_failure(as_failure(report), environ, quiet=True)
    return PROBLEMS


def _report(
    argv: Sequence[str], environ: Mapping[str, str], logged: Sequence[str]
) -> tuple[Job, list[ReportLine]]:
    """Return the job and all findings, in the report's order; fewer after a stop."""
    job, has_script = planned(argv, environ)
    if job is _UNKNOWN:
        return job, [ReportLine("job", OK, line) for line in logged]
    found = at_once(lambda name: [*CHECKS[name](job, environ)], CHECKS, SECONDS)
    report = [ReportLine(name, *finding) for name in CHECKS for finding in found.get(name, [_LATE])]
    return job, [*report, *_of_job(job, logged, has_script=has_script)]


def planned(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Job, bool]:
    """Return the planned job, and whether a script or module is named.

    _UNKNOWN: this host takes no part in it. Nothing is created: it is a dry run.
    """
    try:
        job = prepare(argv, {**environ, "LAUNCHER_DRY_RUN": "true"}) or _UNKNOWN
    except NothingToRunError:
        # Ignore hyperparameters: they belong to another job.
        return planned([*argv, *_ANY], {**environ, "SM_HPS": ""})[0], False
    except LaunchError as error:
        job = _UNKNOWN._replace(error=error)
    if job.error and not isinstance(job.error, LaunchError):
        raise job.error  # a bug of the launcher
    return job, True


def _of_job(job: Job, logged: Sequence[str], *, has_script: bool) -> list[ReportLine]:
    """Report the job's log lines and program, or why it would not start."""
    if job.error:  # the launcher's message has the fix
        return [ReportLine("job", PROBLEM, str(job.error).rstrip("."))]
    report = [
        ReportLine("settings", WARNING if line.startswith("warning: ") else OK, line.rstrip("."))
        # Each once: without a script the same steps are taken twice.
        for line in dict.fromkeys((*logged, *filter(None, [job.plan.reasons, job.plan.remark])))
    ]
    alone = "" if has_script else "no script was given, so only this host was checked; "
    return [*report, ReportLine("job", OK, alone + job.summary())]


# The report


def as_text(job: Job, report: Sequence[ReportLine]) -> str:
    """Return three columns: level, check, finding; the fix is on the next line."""
    lines = []
    for check, level, seen, to_do in report:
        lines.append(f"{level:8} {check:10} {printable(seen)}")
        if to_do:
            lines.append(f"{'':8} {'':10} -> {printable(to_do)}")
    return "\n".join([*lines, _verdict(job, report)])


def _problems(report: Sequence[ReportLine]) -> list[ReportLine]:
    return [line for line in report if line.level == PROBLEM]


def _verdict(job: Job, report: Sequence[ReportLine]) -> str:
    wrong = len(_problems(report))
    warnings = sum(line.level == WARNING for line in report)
    more = f"; {plural(warnings, 'warning')}" if warnings else ""
    where = f" on {job.current_host}" if job.cluster.nnodes > 1 else ""
    if wrong:
        return f"A job would fail{where}: {plural(wrong, 'problem')}{more}."
    if job is _UNKNOWN:
        return "This host would not run any part of the job."
    return f"A job would run{where}{more}."


def as_json(job: Job, report: Sequence[ReportLine]) -> str:
    """Return one JSON object; docs/development/tools.md describes it."""
    found = {
        "launcher": __version__,
        "host": job.cluster.current_host,
        "hosts": job.cluster.nnodes,
        "would_run": not _problems(report),
        "findings": [line._asdict() for line in report],
    }
    return json.dumps(found, indent=1)


def as_failure(report: Sequence[ReportLine]) -> str:
    """Return the problems as SageMaker's failure reason."""
    lines = [
        f"{check}: {printable('; '.join(filter(None, [seen, to_do])))}"
        for check, _, seen, to_do in _problems(report)
    ]
    return "".join(f"{line}\n" for line in ["launcher: doctor: a job would fail", *lines])
