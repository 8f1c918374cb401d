"""The text of `--launcher-help`."""

from __future__ import annotations

from launcher.job.options import OPTIONS, Options
from launcher.text import flag


def help_text() -> str:
    """Return the whole text."""
    lines = [
        "usage: sm-launch (--train-script PATH | --train-module NAME)"
        " [--launcher-OPTION VALUE ...] [SCRIPT ARGUMENT ...]",
        "       sm-launch local [OPTION ...] -- SCRIPT [ARGUMENT ...]",
        "       sm-launch doctor [--json] [ARGUMENT OF A JOB ...]",
        "       sm-launch init [COMMAND [ARGUMENT ...]]",
        "",
        "Run one PyTorch training job on all hosts of a SageMaker cluster with torchrun.",
        "Whatever is not listed here reaches the script unchanged and in order.",
        "With `local`, do so on this machine as on several hosts; see sm-launch local --help.",
        "With `doctor`, say what this host has, and whether a job with these arguments would run.",
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
                default = Options._field_defaults[name]
                silent = default is None or default is False or default in ((), "")
                shown = "" if silent else f" ({str(default).lower()})"
                lines += [
                    f"  {flag(name)} {option.metavar}".rstrip(),
                    f"      {option.help}{shown}",
                ]
    lines += [
        "",
        "  --launcher-help      this text; so is --help as the only argument",
        "",
        "Each option has a twin in the environment: LAUNCHER_GRACE=60 is --launcher-grace 60.",
        "torchrun's own PET_... variables win over what the launcher works out by itself.",
        "",
        "Exit codes: 0 every rank succeeded; the code of the first rank to fail, 128 + n if",
        "signal n killed it; 143 or 130 stopped by SIGTERM or SIGINT; 2 wrong configuration;",
        "69 a host never arrived or was lost; 126 or 127 torchrun cannot be executed or found.",
    ]
    return "\n".join(lines)
