"""The launcher's main(): from arguments and environment to an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launcher import PACKAGE, __version__
from launcher.container.presence import Report, register
from launcher.errors import LaunchError
from launcher.host.signals import Signals
from launcher.host.system import System
from launcher.job import arguments
from launcher.job.cluster import ALONE
from launcher.job.plan import command
from launcher.job.prepare import prepare
from launcher.result.causes import SUCCESS, Result, of_error, of_launcher, stopped
from launcher.result.failure import prepare_failure, write_failure
from launcher.run import summary, supervisor
from launcher.text.log import log, show, traceback_of

# The tools in launcher_tools. All but `local` run before, beside or after a job, and do not count
# for a container's end. None writes a failure file because of its own errors.
_TOOLS = ("local", "doctor", "stacks", "timeline")


def main() -> int:
    """Run the launcher; return its exit code (docs/options.md lists them).

    This is the one place in the launcher's process that reads sys.argv and os.environ.
    """
    argv, environ = sys.argv[1:], dict(os.environ)
    name = argv.pop(0) if argv and argv[0] in ("init", *_TOOLS) else ""
    if name == "init" and (not argv or argv[0].startswith("-")):
        name = ""  # arguments that begin with a dash are a job's
    if not name and (text := _requested_text(argv)):
        show(text)
        return 0
    is_tool = name in _TOOLS
    if not is_tool:
        prepare_failure(environ)
    signals = Signals()  # from here on stops are recorded, even before there is anything to stop
    report = register({} if is_tool and name != "local" else environ)
    try:
        if name == "init":
            from launcher.container import init  # a job does not need it

            result = init.run(argv, environ, signals)
        elif is_tool:
            result = _run_tool(name, argv, environ, signals)
        else:
            result = _launch(argv, environ, signals, report)
    except Exception as error:
        if isinstance(error, LaunchError):
            result, lines = of_error(error).result, [str(error)]
        else:  # the launcher's own, before or after the job
            result = of_launcher(environ.get("SM_CURRENT_HOST") or ALONE, error).result
            lines = traceback_of(error)
        for line in lines:
            log(line)
        if not is_tool:
            write_failure(result.text, environ, quiet=True)
    # A stop is too late now; Python itself takes 10 ms more to exit.
    signals.ignore_stops()
    report(result)
    return result.exit_code


def _requested_text(argv: Sequence[str]) -> str:
    """Return the help or version if these arguments request it; "" if they ask for a job."""
    if arguments.wants_help(argv):
        from launcher.job.help import help_text  # a job does not need it

        return help_text()
    return f"sm-launch {__version__}" if argv == ["--version"] else ""


def _run_tool(
    name: str, argv: Sequence[str], environ: Mapping[str, str], signals: Signals
) -> Result:
    """Run a tool of launcher_tools, a package next to this one that no job needs, or show its help.

    Do not search sys.path for it, where there may be another. Raises LaunchError if it does not
    exist, because somebody has copied the folder launcher/ alone.
    """
    import importlib.util

    folder = os.path.dirname(PACKAGE)
    spec = importlib.machinery.PathFinder.find_spec("launcher_tools", [folder])
    if spec is None:
        raise LaunchError(
            f"`sm-launch {name}` needs the package launcher_tools, which is not in {folder}; "
            "install or copy it there."
        )
    sys.modules.setdefault("launcher_tools", importlib.util.module_from_spec(spec))  # without code
    tool: Any = importlib.import_module(f"launcher_tools.{name}")
    own = argv[: list(argv).index("--")] if "--" in argv else argv
    if arguments.wants_help(argv) or (name != "doctor" and {"-h", "--help"} & {*own}):
        show(tool.HELP)
        return SUCCESS
    result: Result = tool.run(argv, environ, signals)
    return result


def _launch(
    argv: Sequence[str], environ: Mapping[str, str], signals: Signals, report: Report
) -> Result:
    job = prepare(argv, environ)
    if job is None:
        return SUCCESS
    if job.options.dry_run:
        report(None)
    # After a stop do not log the plan: it may lack devices, and nothing will start.
    if not (stop := signals.stop):
        if job.error and not job.has_peers:
            raise job.error
        for line in job.lines():
            log(line)
    if job.options.dry_run:
        if not stop:
            show(command(job.plan, job.options.folder))
        return stopped(stop) if stop else SUCCESS
    system = System(signals)
    end = supervisor.run(job, environ, system)
    result = end.result
    assert result
    for line in summary.lines(end, system.now()):
        log(line)
    if result.exit_code and not result.stop_signal:
        write_failure(result.text, environ)
    return result
