"""`sm-launch local`: from its arguments to the job's exit code, and its messages."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence

from launcher.host.signals import Signals
from launcher.job import resources
from launcher.job.options import BARS, EVENTS_DIR, HOST_ADDRESSES
from launcher.result.causes import SUCCESS, Result, exit_code_of, stopped
from launcher.text.log import log
from launcher.text.words import join_and_count, plural, printable, short, signal_name
from launcher_tools import local_options, local_setup, timeline
from launcher_tools.local_hosts import Host, Loop
from launcher_tools.local_options import Choices
from launcher_tools.local_output import Output
from launcher_tools.local_setup import Share

HELP = local_options.HELP
_NAMED = 8  # files of a folder, at most


def run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Run a job on this machine; return how it ended. Raises LaunchError for a user's mistake."""
    chosen = local_options.parse(argv, environ)
    if chosen.doctor and not chosen.run_dir:
        with tempfile.TemporaryDirectory(prefix="sm-launch-doctor-") as folder:
            return _run(chosen._replace(run_dir=folder), environ, signals)
    return _run(chosen, environ, signals)


def _run(chosen: Choices, environ: Mapping[str, str], signals: Signals) -> Result:
    resources.read_resources()  # raises LaunchError without torch, before anything is created
    shares = local_setup.shares(len(chosen.hosts), environ)
    if stop := signals.stop:  # a stop during the query for GPUs
        log(f"{signal_name(stop)}: nothing was started.")
        return stopped(stop)
    passed, refused = local_setup.as_hyperparameters(chosen.script_args)
    name = f"local-{time.strftime('%Y%m%d-%H%M%S')}"
    job_name = f"{name}-{os.getpid()}"
    wanted = chosen.run_dir or os.path.join("runs", name)
    run_dir = local_setup.make_run_dir(wanted, chosen.hosts[0])
    named = {chosen.target[0][2:]: json.dumps(chosen.target[1])} if chosen.target else {}
    local_setup.fill(run_dir, chosen.hosts, chosen.channels, {**named, **passed})
    output, log_dir = Output(environ), chosen.options.log_dir
    internal = {
        # Names sort like these addresses, by which torchrun sorts the hosts.
        HOST_ADDRESSES: json.dumps(dict(zip(chosen.hosts, (share.address for share in shares)))),
        # If the user names a folder for logs, events go there, too.
        EVENTS_DIR: os.path.abspath(log_dir or run_dir),
        BARS: "".join(str(fd) for fd in sorted(output.terminals)),
    }
    ports = local_setup.free_ports()
    hosts = []
    for number, share in enumerate(shares, 1):
        base_dir = os.path.join(run_dir, f"algo-{number}")
        variables = local_setup.environment(environ, base_dir, job_name, share, ports)
        hosts.append(Host(number, share.cpus, base_dir, {**variables, **internal}))
    words = [*chosen.words, *(chosen.script_args if refused else ())]
    loop = Loop(hosts, chosen.events, ["doctor"] * chosen.doctor + words, signals, output)
    lines = _beginning(chosen, shares, run_dir)
    for line in lines + _what_is_passed(chosen.script_args, passed, refused):
        output.say(line)
    end = ""
    try:
        seconds = loop.run()
        if chosen.doctor:
            end = _end_of_doctors(hosts)
        else:
            end = _end(run_dir, log_dir, hosts, seconds, loop.was_stopped)
    finally:
        output.end(end, signals)
    return result_of(hosts)


# Messages


def _beginning(chosen: Choices, shares: Sequence[Share], run_dir: str) -> list[str]:
    """Return the lines with each host's share of the machine."""
    count, first = len(shares), shares[0]
    named = [f"algo-{number}: {share.address}" for number, share in enumerate(shares, 1)]
    who = ", ".join(named if count < 3 else [named[0], "...", named[-1]])
    gpus = f" and {plural(len(first.gpus), 'GPU')}" if first.gpus else ""
    each = plural(first.cores, "core") + gpus + (" each" if count > 1 else "")
    after = "is after --, so it is passed to the script; options of sm-launch local must be before"
    lines = [f"{words} {after} --." for words in local_options.meant_for_local(chosen.script_args)]
    lines.append(f"{who}; {each}; the hosts' folders are in {run_dir}.")
    if first.gpus == ():
        lines.append(f"there are fewer GPUs than hosts ({count}), so no host has a GPU.")
    processes = count * (chosen.options.nproc_per_node or len(first.gpus or ()) or 1)
    cores = len({share.cpus for share in shares}) * first.cores
    if processes > cores:
        lines.append(f"{processes} processes share {plural(cores, 'core')}.")
    return lines


def _what_is_passed(args: Sequence[str], passed: Mapping[str, str], refused: str) -> list[str]:
    """Return the lines about arguments that SageMaker would pass in another form, or not at all."""
    changed = local_setup.changes(args, passed)
    if changed:
        values = join_and_count(changed[:5], len(changed[5:]))
        return [f"as SDK v2 would pass them: {values}; sorted by name."]
    if not refused:
        return []
    return [
        "the arguments are passed to the script unchanged, but SageMaker could not pass "
        f"{short(refused, 60)}: it passes only `--key value` pairs, each key at most once."
    ]


def result_of(hosts: Sequence[Host]) -> Result:
    """Return how the job ended: a failed launcher's result counts before a killed one's."""
    ended = [host.process.returncode for host in hosts if host.process]
    # A launcher that SIGKILL has not ended yet (the loop waits for 10 s) counts as killed.
    codes = [-signal.SIGKILL if code is None else code for code in ended]
    for code in sorted(codes, key=lambda code: code < 0):
        if code:
            return Result(exit_code_of(code))
    return SUCCESS if codes else stopped(signal.SIGTERM)  # before any host started


def _end_of_doctors(hosts: Sequence[Host]) -> str:
    failed = [host.name for host in hosts if host.process and host.process.returncode]
    if failed:
        return f"A job would fail: see what {', '.join(failed)} found.\n"
    return "A job would run on every host.\n"


def _end(
    run_dir: str, log_dir: str, hosts: Sequence[Host], seconds: float, was_stopped: bool
) -> str:
    """Return how the job ended, why, and where its files are, each line with its newline."""
    lines = []
    for folder in local_setup.RESULTS:
        for host in hosts:
            names = local_setup.listed(run_dir, host.name, folder)
            if names:
                shown = join_and_count(names[:_NAMED], len(names[_NAMED:]))
                lines.append(f"  {os.path.join(host.name, folder)}: {printable(shown)}")
    reasons: dict[str, list[str]] = {}
    for host in hosts:
        reason = local_setup.failure_reason(run_dir, host.name)
        if reason:
            lines.append(f"  {os.path.join(host.name, local_setup.FAILURE)}")
            reasons.setdefault(reason, []).append(host.name)
    lines.append(f"  {timeline.left_in(run_dir, log_dir or run_dir)}")
    code, how = result_of(hosts).exit_code, "succeeded"
    if code:
        word = "was stopped" if was_stopped and not reasons else "failed"
        how = f"{word} with exit code {code}"
    lines.insert(0, f"The job {how} after {seconds:.0f} s. Outputs in {run_dir}:")
    for reason, names in reasons.items():
        lines.append(f"SageMaker would show this failure reason ({', '.join(names)}):")
        lines += [f"  {printable(line)}" for line in reason.splitlines()]
    return "".join(line + "\n" for line in lines)
