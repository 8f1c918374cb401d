"""What is said at the start, and at the end: how the job ended, why, and where its files are."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from launcher.text import join_and_count, plural, printable, short
from launcher_tools import local_folders
from launcher_tools.local_host import Host
from launcher_tools.local_hyperparameters import Passable, changes
from launcher_tools.local_options import Choices
from launcher_tools.local_shares import Share

_NAMED = 8  # files of a folder


def beginning(
    chosen: Choices, shares: Sequence[Share], run_dir: str, passable: Passable
) -> list[str]:
    """Return the lines for the log: what each host has, and what is not as on SageMaker."""
    count, first = len(shares), shares[0]
    who = f"algo-1 is {first.address}"
    if count > 1:
        who += f"{',' if count == 2 else ' ...'} algo-{count} is {shares[-1].address}"
    gpus = f" and {plural(len(first.gpus), 'GPU')}" if first.gpus else ""
    each = plural(first.cores, "core") + gpus
    lines = [f"{who}, each with {each}; their folders are in {run_dir}."]
    if first.gpus == ():
        lines.append(f"there are fewer GPUs than {count} hosts: none has one.")
    processes = count * (chosen.nproc_per_node or len(first.gpus or ()) or 1)
    cores = len({share.cpus for share in shares}) * first.cores
    if processes > cores and first.cpus:
        lines.append(f"{processes} processes share {plural(cores, 'core')}.")
    if passable.refused:
        lines.append(
            f"the arguments reach the script as they are, but SageMaker can pass none like "
            f"{short(passable.refused, 60)}: it passes `--key value`, each key once."
        )
    changed = changes(chosen.script_args, passable.hyperparameters)
    if changed:
        lines.append(f"as on SageMaker, {join_and_count(changed[:5], len(changed[5:]))}.")
    return lines


def exit_code(hosts: Sequence[Host]) -> int:
    """Return the job's exit code: that of a launcher that failed, before one that was killed."""
    codes = [host.process.returncode for host in hosts if host.process]
    # One that SIGKILL has not ended yet (loop.py waits for 10 s) counts as killed.
    codes = [-signal.SIGKILL if code is None else code for code in codes]
    for code in sorted(codes, key=lambda code: code < 0):
        if code:
            return code if code > 0 else 128 - code
    return 0 if codes else 128 + signal.SIGTERM  # stopped before any host started


def end_of_doctors(hosts: Sequence[Host]) -> str:
    """Return what the doctors of all hosts found, in one line."""
    failed = [host.name for host in hosts if host.process and host.process.returncode]
    if failed:
        return f"A job would fail, for what {', '.join(failed)} found.\n"
    return "A job would run on every host.\n"


def end(run_dir: str, hosts: Sequence[Host], seconds: float, *, was_stopped: bool) -> str:
    """Return how the job ended, why, and where its files are, each line with its newline."""
    lines = []
    for folder in (local_folders.MODEL, local_folders.OUTPUT, local_folders.CHECKPOINTS):
        for host in hosts:
            names = local_folders.listed(run_dir, host.name, folder)
            if names:
                shown = join_and_count(names[:_NAMED], len(names[_NAMED:]))
                lines.append(f"  {os.path.join(host.name, folder)}: {printable(shown)}")
    reasons: dict[str, list[str]] = {}
    for host in hosts:
        reason = local_folders.failure_reason(run_dir, host.name)
        if reason:
            lines.append(f"  {os.path.join(host.name, local_folders.FAILURE)}")
            reasons.setdefault(reason, []).append(host.name)
    code, how = exit_code(hosts), "succeeded"
    if code:
        word = "was stopped" if was_stopped and not reasons else "failed"
        how = f"{word}, with exit code {code},"
    where = f"Its files, in {run_dir}:" if lines else f"It left no files but its logs in {run_dir}."
    lines.insert(0, f"The job {how} after {seconds:.0f} s. {where}")
    for reason, names in reasons.items():
        lines.append(f"SageMaker would show this failure reason ({', '.join(names)}):")
        lines += [f"  {printable(line)}" for line in reason.splitlines()]
    return "".join(line + "\n" for line in lines)
