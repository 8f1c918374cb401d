"""The text of `--launcher-help`."""

from __future__ import annotations

import math
import signal

from launcher.errors import (
    EXIT_CANNOT_EXECUTE,
    EXIT_HOST_LOST,
    EXIT_HUNG,
    EXIT_NOT_FOUND,
    EXIT_SOFTWARE,
    EXIT_USAGE,
)
from launcher.job.options import OPTIONS, Options
from launcher.text.words import flag

# docs/options.md shows this table, too.
EXIT_CODES = {
    "0": "every rank succeeded",
    "the script's own": "the first rank to fail exited with it; 1 for an exception",
    "128 + n": "the first rank to fail was killed by signal n",
    f"{128 + signal.SIGTERM}, {128 + signal.SIGINT}": (
        "the job was stopped by SIGTERM, SIGINT"
        f" ({128 + signal.SIGHUP}, {128 + signal.SIGQUIT}: SIGHUP, SIGQUIT)"
    ),
    f"{EXIT_USAGE}": "the configuration is wrong; no rank was started",
    f"{EXIT_HOST_LOST}": (
        "a host never arrived or was lost, the hosts could not meet, or torchrun was killed"
    ),
    f"{EXIT_SOFTWARE}": "the launcher itself failed; its log says why",
    f"{EXIT_HUNG}": f"nothing moved for {flag('hang_timeout')} seconds",
    f"{EXIT_CANNOT_EXECUTE}, {EXIT_NOT_FOUND}": "torchrun cannot be executed, or is not installed",
}


def default_of(name: str) -> str:
    """Return an option's default as a person would type it; "" if there is nothing to type."""
    default = Options._field_defaults[name]
    if default in (None, math.inf):
        return "auto" if default is None else "0"
    return "" if default in ((), "") else str(default).lower()


def help_text() -> str:
    """Return the whole text."""
    lines = [
        "usage: sm-launch (--train-script PATH | --train-module NAME)"
        " [--launcher-OPTION VALUE ...] [SCRIPT ARGUMENT ...]",
        "       sm-launch local [OPTION ...] -- SCRIPT [ARGUMENT ...]",
        "       sm-launch doctor [--json] [ARGUMENT OF A JOB ...]",
        "       sm-launch stacks",
        "       sm-launch timeline DIR [-o PAGE] [--text]",
        "       sm-launch init [COMMAND [ARGUMENT ...]]",
        "",
        "Run one PyTorch training job on all hosts of a SageMaker cluster with torchrun.",
        "Whatever is not listed here reaches the script unchanged and in order.",
        "With `local`, do so on this machine as on several hosts; see sm-launch local --help.",
        "With `doctor`, say what this host has, and whether a job with these arguments would run.",
        "With `stacks`, beside a running job, print where all its ranks are, on all hosts.",
        "With `timeline`, draw what each rank of a job did when, from what its hosts have noted.",
        "With `init`, be a container's PID 1: run COMMAND (SageMaker's is `train`) and pass stops",
        "on to the launcher below it. If COMMAND is missing or is an option, be the launcher.",
        "",
        "What to run (one of them):",
        "  --train-script PATH  run a Python file (or archive, or folder), as `python PATH` would",
        "  --train-module NAME  run a module, as `python -m NAME` would",
    ]
    for group in dict.fromkeys(option.group for option in OPTIONS.values()):
        lines += ["", group + ":"]
        for name, option in OPTIONS.items():
            if option.group == group:
                default = default_of(name)
                shown = "" if default in ("", "false") else f" ({default})"
                lines += [
                    f"  {flag(name)} {option.metavar}".rstrip(),
                    f"      {option.help}{shown}",
                ]
    lines += [
        "",
        "  --launcher-help      this text; so is --help as the only argument",
        "  --version            the launcher's version, as the only argument",
        "",
        "Each option has a twin in the environment: LAUNCHER_GRACE=60 is --launcher-grace 60.",
        "torchrun's own PET_... variables win over what the launcher works out by itself.",
        "",
        "Exit codes:",
        *(f"  {code:16}  {meaning}" for code, meaning in EXIT_CODES.items()),
    ]
    return "\n".join(lines)
