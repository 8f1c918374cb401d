"""A job as one of its hosts sees it, for tests that plan none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import LaunchError
from launcher.job.job import Cluster, Job, LaunchPlan
from launcher.job.options import Options


def job_of(
    current_host: str,
    hosts: Sequence[str],
    *,
    name: str = "job",
    fingerprint: Mapping[str, Any] | None = None,
    runner: str = "",
    **options: Any,
) -> Job:
    """Return it: `fingerprint` is {} if this host cannot start; `options` are Options' fields."""
    cluster = Cluster(tuple(hosts), current_host, name, 0, 0, "")
    if fingerprint == {}:
        return Job(cluster, Options(**options), error=LaunchError("--train-script: there is none"))
    agree = fingerprint or {"script": "script train.py"}
    argv = ("torchrun", "--", "python", "stub.py")
    plan = LaunchPlan(argv, {}, "2", fingerprint=agree, runner=runner)
    return Job(cluster, Options(**options), plan)
