"""`sm-launch doctor` in one screen: look, judge, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.errors import EXIT_USAGE
from launcher.job import arguments
from launcher.log import log, show
from launcher.presence import Ending
from launcher.result.failure import write_failure
from launcher.signals import Signals
from launcher.text import signal_name
from launcher_tools import doctor_judge_job, doctor_report
from launcher_tools.doctor_finding import problems
from launcher_tools.doctor_look import look
from launcher_tools.doctor_tasks import Stopped

_HELP = """\
usage: sm-launch doctor [--json] [ARGUMENT OF A JOB ...]

Say what the launcher sees on this host, and whether a job would run: each line with ok, warning or
problem, and what to do. With a job's arguments and options it checks that job; without a script or
module it checks the host alone. Nothing of the job is started.

  --json  one JSON object in place of the table; has to come first

Exit codes: 0 a job would run, warnings or not; 2 it would fail."""


def run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Ending:
    """Look at this host, and report; return 2 as the exit code if a job would fail."""
    if arguments.wants_help(argv):
        show(_HELP)
        return Ending(0)
    as_json = argv[:1] == ["--json"]
    try:
        facts = look(argv[1:] if as_json else argv, environ, signals)
    except Stopped as stop:
        log(f"{signal_name(stop.number)}: doctor stops.")
        return Ending(128 + stop.number, was_stopped=True)
    findings = doctor_judge_job.judge(facts)
    show((doctor_report.as_json if as_json else doctor_report.text)(facts, findings))
    if not problems(findings):
        return Ending(0)
    write_failure(doctor_report.failure(findings), environ, quiet=True)
    return Ending(EXIT_USAGE)
