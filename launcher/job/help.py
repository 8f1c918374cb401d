"""The text of `--launcher-help`."""

from __future__ import annotations

import math
import textwrap

from launcher.errors import EXIT_CODES
from launcher.job.options import OPTIONS, Options
from launcher.text.words import flag

_COLUMNS = 100
# The first option of each group.
GROUPS = {
    "nproc_per_node": "Job size",
    "rdzv_port": "Connecting the hosts",
    "grace": "Stops and failures",
    "watch": "Hangs",
    "bools": "torchrun and the script",
    "start": "Starting ranks",
    "log_dir": "Launcher output",
}
_TEXT = """\
usage: sm-launch (--train-script PATH | --train-module NAME) [--launcher-OPTION VALUE ...]
                 [SCRIPT ARGUMENT ...]
       sm-launch COMMAND ...

Run one PyTorch training job on all hosts of a SageMaker cluster with torchrun.
All arguments that are not listed here are passed to the script, unchanged and in order.

Commands:
  local [OPTION ...] -- SCRIPT [ARGUMENT ...]: run the job here as if on several hosts (see
      sm-launch local --help)
  doctor [--json] [JOB ARGUMENT ...]: check this host, and whether such a job would run
  stacks: for each job running here, print the Python stacks of all ranks on all hosts
  timeline DIR [-o PAGE] [--text]: show what each rank did, and when, from the hosts' events.jsonl
  init [COMMAND [ARGUMENT ...]]: run as the container's PID 1 and forward stops to the launcher that
      COMMAND (on SageMaker most often `train`) runs; without COMMAND, run the launcher directly

What to run (exactly one of these):
  --train-script PATH  run a Python file (or archive, or folder), as `python PATH` would
  --train-module NAME  run a module, as `python -m NAME` would
{options}

  --launcher-help      show this help (or --help, as the only argument)
  --version            show the launcher's version (as the only argument)

Every option can also be set by an environment variable: LAUNCHER_GRACE=60 is --launcher-grace 60.
torchrun's own PET_... variables override what the launcher would choose by itself.

Exit codes:
{codes}"""


def default_of(name: str) -> str:
    """Return an option's default as a person would type it; "" if there is nothing to type."""
    words = {None: "auto", math.inf: "0", (): ""}
    default = Options._field_defaults[name]
    return words.get(default, str(default).lower())


def help_text() -> str:
    """Return the whole text."""
    lines: list[str] = []
    for name, option in OPTIONS.items():
        if name in GROUPS:
            lines += ["", f"{GROUPS[name]}:"]
        default = default_of(name)
        meaning = f"{option.help} (default: {default})" if default else option.help
        lines.append(f"  {flag(name)} {option.metavar}")
        wrapped = textwrap.wrap(meaning, _COLUMNS - 6, break_on_hyphens=False)
        lines += [f"      {line}" for line in wrapped]
    codes = "\n".join(f"  {code:16}  {meaning}" for code, meaning in EXIT_CODES.items())
    return _TEXT.format(options="\n".join(lines), codes=codes)
