"""The report of findings: for people, for machines, and for SageMaker's failure reason. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from launcher.text import plural, printable
from launcher_tools.doctor_facts import Facts
from launcher_tools.doctor_finding import Finding, Level, problems


def text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return three columns: how it is, what was checked, what was seen; below it what to do."""
    lines = []
    for check, level, seen, to_do in findings:
        lines.append(f"{level.value:8} {check:10} {printable(seen)}")
        if to_do:
            lines.append(f"{'':8} {'':10} -> {printable(to_do)}")
    return "\n".join([*lines, _verdict(facts, findings)])


def _verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    wrong = len(problems(findings))
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    more = f"; {plural(warnings, 'warning')}" if warnings else ""
    where = f" on {facts.job.current_host}" if facts.job.nnodes > 1 else ""
    if wrong:
        return f"A job would fail{where}: {plural(wrong, 'problem')}{more}."
    if not facts.job.takes_part:
        return f"This host takes no part in the job{more}."
    return f"A job would run{where}{more}."


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return one JSON object; docs/doctor.md describes it."""
    report = {
        "launcher": facts.versions.launcher,
        "host": facts.job.current_host,
        "hosts": facts.job.nnodes,
        "would_run": not problems(findings),
        "findings": [
            {"check": check, "level": level.value, "seen": seen, "to_do": to_do}
            for check, level, seen, to_do in findings
        ],
    }
    return json.dumps(report, indent=1)


def failure(findings: Sequence[Finding]) -> str:
    """Return the problems as SageMaker's failure reason."""
    lines = [
        f"{check}: {printable('; '.join(filter(None, [seen, to_do])))}"
        for check, _, seen, to_do in problems(findings)
    ]
    return "".join(f"{line}\n" for line in ["launcher: doctor: a job would fail", *lines])
