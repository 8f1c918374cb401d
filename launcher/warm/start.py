"""The launcher's end of a warm start: the process that forks this host's keepers (warm.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from launcher import PACKAGE
from launcher.host.child import Helper
from launcher.host.system import System
from launcher.job.job import Job
from launcher.text.words import flag, printable

WARM = os.path.join(PACKAGE, "warm", "warm.py")


def begin(system: System, job: Job, environ: Mapping[str, str], run_dir: str) -> Helper:
    """Have torch imported while the hosts join; stubs find the process by its socket in `run_dir`.

    If it cannot fork keepers, a line in the log explains why, and they are started cold.
    """

    def fail(message: Mapping[str, Any]) -> None:
        why = printable(str(message["why"]))
        system.log(f"{flag('start')} warm falls back to cold: {why}.")
        helper.close()

    plan, options = job.plan, job.options
    path, name = os.path.join(run_dir, "warm"), "the process that forks the ranks"
    script = os.path.join(options.folder, options.train_script)
    folder = os.path.dirname(os.path.realpath(script)) if options.train_script else ""
    argv = (plan.python, "-u", WARM, path, folder, *options.preload)
    environ = {**environ, **plan.environment}
    helper = system.start_helper(argv, environ, options.folder, name, fail)
    return helper
