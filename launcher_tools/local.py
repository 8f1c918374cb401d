"""`sm-launch local` in one screen: from its arguments to the job's exit code."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence

from launcher.errors import LaunchError
from launcher.job import resources
from launcher.job.options import HOST_ADDRESSES
from launcher.log import log, show
from launcher.presence import Ending
from launcher.signals import Signals
from launcher.text import signal_name
from launcher_tools import (
    local_folders,
    local_hyperparameters,
    local_options,
    local_report,
    local_shares,
)
from launcher_tools.local_host import Host
from launcher_tools.local_loop import Loop
from launcher_tools.local_output import Output
from launcher_tools.local_printer import Printer

_LOOPBACK = "lo"


def run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Ending:
    """Run a job on this machine; return how it ended. A person's mistake is one line in the log."""
    if local_options.wants_help(argv):
        show(local_options.help_text())
        return Ending(0)
    try:
        return _run(argv, environ, signals)
    except LaunchError as error:
        # Not for a failure file: this is no host of a job.
        log(str(error))
        return Ending(error.exit_code)


def _run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Ending:
    chosen = local_options.parse(argv, environ)
    if chosen.doctor and not chosen.run_dir:
        with tempfile.TemporaryDirectory(prefix="sm-launch-doctor-") as folder:
            return _run_hosts(chosen._replace(run_dir=folder), environ, signals)
    return _run_hosts(chosen, environ, signals)


def _run_hosts(
    chosen: local_options.Choices, environ: Mapping[str, str], signals: Signals
) -> Ending:
    facts = resources.read_resources()
    parts = local_shares.shares(len(chosen.hosts), environ, signals)
    if number := signals.stop():  # while the driver was asked for GPUs
        log(f"{signal_name(number)}: nothing was started.")
        return Ending(128 + number, was_stopped=True)
    ports = local_shares.free_ports(2)
    passable = local_hyperparameters.of_arguments(chosen.script_args)
    name = f"local-{time.strftime('%Y%m%d-%H%M%S')}"
    job_name = f"{name}-{os.getpid()}"
    run_dir = local_folders.make_run_dir(
        chosen.run_dir or os.path.join("runs", name), chosen.hosts[0]
    )
    named = {chosen.target[0][2:]: json.dumps(chosen.target[1])} if chosen.target else {}
    hyperparameters = {**named, **passable.hyperparameters}
    interface = _LOOPBACK if _LOOPBACK in facts.interfaces else ""
    local_folders.fill(run_dir, chosen.hosts, chosen.channels, hyperparameters, interface)
    # Names sort as these addresses do, by which torchrun sorts the hosts.
    addresses = {host: part.address for host, part in zip(chosen.hosts, parts)}
    hosts = []
    for number, (host, part) in enumerate(zip(chosen.hosts, parts), 1):
        base_dir = os.path.join(run_dir, host)
        variables = local_folders.environment(environ, base_dir, job_name, part, ports)
        variables[HOST_ADDRESSES] = json.dumps(addresses)
        hosts.append(Host(number, part, variables))
    words = [*chosen.launcher_words, *(chosen.script_args if passable.refused else ())]
    if chosen.doctor:
        words.insert(0, "doctor")
    with Printer(Output(environ), signals) as printer:
        for line in local_report.beginning(chosen, parts, run_dir, passable):
            printer.say(line)
        mark = ("TRAINING_JOB_NAME", job_name)
        loop = Loop(hosts, chosen.events, words, signals, printer, mark)
        seconds = loop.run()
        if chosen.doctor:
            printer.show(local_report.end_of_doctors(hosts))
        else:
            printer.show(local_report.end(run_dir, hosts, seconds, was_stopped=loop.was_stopped))
    return Ending(local_report.exit_code(hosts), was_stopped=loop.was_stopped)
