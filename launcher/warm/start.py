"""The launcher's end of a warm start: the process that forks this host's keepers (warm.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from launcher import PACKAGE
from launcher.host.system import System
from launcher.job.job import Job
from launcher.text.words import flag, printable

WARM = os.path.join(PACKAGE, "warm", "warm.py")


class Warm:
    """Imports torch while the hosts join; `environ` has torchrun's stubs find it.

    If it cannot fork keepers, a line in the log explains why, and they are started cold.
    """

    def __init__(self, system: System, job: Job, environ: Mapping[str, str], run_dir: str) -> None:
        self._system, plan, options = system, job.plan, job.options
        path = os.path.join(os.path.abspath(run_dir), "warm")
        self.environ: Mapping[str, str] = {"LAUNCHER_WARM": path}
        script = os.path.join(options.folder, options.train_script)
        folder = os.path.dirname(os.path.realpath(script)) if options.train_script else ""
        python = plan.argv[plan.argv.index("--") + 1]
        argv = (python, "-u", WARM, path, folder, *options.preload)
        environ, name = {**environ, **plan.environment}, "the process that forks the ranks"
        self._helper = system.start_helper(argv, environ, options.folder, name, self._fail)
        self.close = self._helper.close

    def _fail(self, message: Mapping[str, Any]) -> None:
        why = printable(str(message["why"]))
        self._system.log(f"{flag('start')} warm falls back to cold: {why}.")
        self.environ = {}
        self.close()
