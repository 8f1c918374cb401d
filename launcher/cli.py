"""Wires the rooms together: from arguments and environment to an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Callable

from launcher import init
from launcher.errors import LaunchError, log
from launcher.job import options, target, toolkit
from launcher.job.cluster import Cluster, read_cluster
from launcher.job.machine import interface_of, read_machine
from launcher.job.options import Options
from launcher.job.plan import LaunchPlan, at_address, make_plan
from launcher.presence import Ending, Presence
from launcher.result import failure
from launcher.result.failure import OWN, Outcome, Verdict
from launcher.run import supervisor as supervise
from launcher.signals import Signals, signal_name

if TYPE_CHECKING:
    from launcher.peers.channel import Peers


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the launcher; return its exit code (README.md lists them).

    This is the one place that reads sys.argv and os.environ.
    """
    argv = sys.argv[1:] if argv is None else argv
    environ = dict(os.environ) if environ is None else environ
    run: Callable[[Sequence[str], Mapping[str, str], Signals], Ending] = _launch
    if argv[:1] == ["init"]:
        argv = argv[1:]
        # A container's arguments that begin with a dash are the launcher's own.
        if argv and not argv[0].startswith("-"):
            run = init.run
    if run is _launch and options.wants_help(argv):
        print(options.help_text())
        return 0
    # From here on a stop is noted, even before there is anything to stop.
    with Signals() as signals, Presence(environ) as presence:
        try:
            ending = run(argv, environ, signals)
        except LaunchError as error:
            log(str(error))
            failure.write_failure(f"launcher: {error}\n", environ, quiet=True)
            ending = Ending(error.exit_code)
        # A stop that comes now comes too late; Python itself takes 10 ms more to end.
        signals.ignore_stops()
        presence.ends(ending)
        return ending.exit_code


class _MistakeHere(LaunchError):
    """One that the other hosts of the job need not have made: they are to hear of it."""

    def __init__(self, error: LaunchError, cluster: Cluster, chosen: Options) -> None:
        super().__init__(str(error), exit_code=error.exit_code)
        self.cluster = cluster
        self.chosen = chosen


def _launch(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Ending:
    try:
        started = prepare(argv, environ)
    except _MistakeHere as mistake:
        if not _has_peers(mistake.cluster, mistake.chosen):
            raise
        return _run_with_peers(None, mistake, mistake.cluster, mistake.chosen, environ, signals)
    if started is None:
        return Ending(0)
    plan, chosen = started
    for line in (plan.summary(), *plan.remarks):
        log(line)
    if chosen.dry_run:
        # As bytes: arguments need not be text in this terminal's encoding.
        sys.stdout.buffer.write(os.fsencode(plan.command() + "\n"))
        return Ending(0)
    if _has_peers(plan.cluster, chosen):
        return _run_with_peers(plan, None, plan.cluster, chosen, environ, signals)
    stops = [number for number in signals.take() if number != signal.SIGCHLD]
    if stops:
        log(f"{signal_name(stops[0])} before anything was started.")
        return Ending(128 + stops[0], was_stopped=True)
    outcome = supervise.run(plan, environ, signals)
    text = failure.failure_text(outcome, plan.cluster, plan.rdzv_endpoint)
    verdict = Verdict(outcome.exit_code, text, outcome.stop_signal)
    return report(verdict, outcome, plan.cluster, environ)


def _has_peers(cluster: Cluster, chosen: Options) -> bool:
    return cluster.nnodes > 1 and chosen.peers and not chosen.dry_run


def _run_with_peers(
    plan: LaunchPlan | None,
    mistake: LaunchError | None,
    cluster: Cluster,
    chosen: Options,
    environ: Mapping[str, str],
    signals: Signals,
) -> Ending:
    """Start when all hosts do, and end as all do; a mistake in place of a plan is told to them."""
    from launcher.peers import channel as peers  # which one host, or a dry run, does not need

    outcome = None
    verdict: Verdict | None = None
    alike = plan.alike if plan else {}
    try:
        with peers.join(cluster, chosen.peer_port, chosen.start_timeout, alike) as channel:
            if plan:
                channel.roll_call(signals)
                if channel.go and channel.verdict is None:
                    plan = _at_address(plan, channel, environ)
                    try:
                        outcome = supervise.run(plan, environ, signals, channel)
                    except LaunchError as error:
                        mistake = error
            if mistake:
                text = f"launcher: {cluster.current_host}: {mistake}\n"
                channel.case(OWN, mistake.exit_code, text)
                verdict = Verdict(mistake.exit_code, text)
            channel.leave(signals)
            verdict = channel.verdict or verdict
    except LaunchError:
        if not mistake:
            raise
        # This mistake is what counts, not one in telling it.
    assert verdict
    return report(verdict, outcome, cluster, environ)


def _at_address(plan: LaunchPlan, channel: Peers, environ: Mapping[str, str]) -> LaunchPlan:
    """Have torchrun and gloo use the address that the other hosts have found this one at."""
    chosen = "GLOO_SOCKET_IFNAME" in environ or "GLOO_SOCKET_IFNAME" in plan.environment
    interface = "" if chosen else interface_of(channel.own_address)
    made = at_address(plan, channel.own_address, interface, has_name=channel.name_leads_here)
    for line in made.remarks[len(plan.remarks) :]:
        log(line)
    return made


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[LaunchPlan, Options] | None:
    """Return what to start and how; None where this host takes no part in the job.

    Raises LaunchError for whatever a person has to mend first.
    """
    _refuse_nesting(environ)
    try:
        os.getcwd()
    except OSError:
        raise LaunchError(
            "the current folder has been removed; change to one that exists."
        ) from None
    config = None if "SM_HOSTS" in environ else toolkit.read_config(environ)
    made: dict[str, str] = {}
    if config is not None:
        # SageMaker starts an image with the word `train`; the script is a hyperparameter.
        argv = [] if list(argv) == ["train"] else argv
        try:
            argv = [*toolkit.to_cmd_args(config.hyperparameters), *argv]
            made = toolkit.to_env_vars(config, environ)
        except RecursionError:
            raise LaunchError(f"a file in {config.folder} is nested too deep.") from None
    seen = {**made, **environ}
    chosen = options.parse(argv, environ)
    if chosen.instance_groups and "SM_INSTANCE_GROUPS_DICT" not in seen:
        # SDK v3 makes SM_HOSTS, but no variable of the groups.
        files = toolkit.read_config(environ)
        groups = toolkit.instance_groups(files.resource_config) if files else {}
        seen["SM_INSTANCE_GROUPS_DICT"] = json.dumps(groups)
    try:
        cluster = read_cluster(seen, chosen.instance_groups)
    except LaunchError as error:
        if config is None:
            raise
        raise LaunchError(f"{error} (The SM_ variables were made from {config.folder}.)") from None
    if not cluster.takes_part:
        log(
            f"{cluster.current_host} is in none of the instance groups "
            f"{', '.join(chosen.instance_groups)}; nothing to do here."
        )
        return None
    try:
        chosen = target.located(chosen, (toolkit.code_dir(environ), chosen.script_dir))
        plan = _planned(chosen, cluster, environ, made)
        if _has_peers(cluster, chosen) and cluster.node_rank == 0:
            _require_port(plan)
    except LaunchError as error:
        raise _MistakeHere(error, cluster, chosen) from None
    # Said only now: a mistake is to be the one line that people see.
    for variable in chosen.unknown_twins:
        log(f"warning: {variable} is no option of the launcher; see --launcher-help.")
    if "SM_HOSTS" not in seen:
        log("neither SM_HOSTS nor config files are there: this host is alone.")
    return plan, chosen


def _planned(
    chosen: Options, cluster: Cluster, environ: Mapping[str, str], made: Mapping[str, str]
) -> LaunchPlan:
    if chosen.log_dir and not chosen.dry_run:
        try:
            os.makedirs(chosen.log_dir, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--launcher-log-dir: cannot make the folder {chosen.log_dir} ({error.strerror})."
            ) from None
    added = {name: value for name, value in made.items() if name not in environ}
    machine = read_machine()
    unknown = cluster.network_interface_name not in machine.interfaces
    # The channel finds out by itself, and does not have to wait for an answer from DNS.
    alone = cluster.nnodes == 1 or _has_peers(cluster, chosen)
    if unknown and not alone and "GLOO_SOCKET_IFNAME" not in environ:
        machine = machine._replace(own_interface=interface_of(cluster.current_host))
    return make_plan(chosen, cluster, machine, environ, added=added)


def _require_port(plan: LaunchPlan) -> None:
    """See on the first host that torchrun's store can listen; it would take seconds to fail."""
    import errno

    from launcher.peers import addresses  # one host has no port

    try:
        for listener in addresses.listen([], int(plan.rdzv_endpoint.rpartition(":")[2])):
            listener.close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"{failure.port_is_taken(plan.rdzv_endpoint)}.") from None


def _refuse_nesting(environ: Mapping[str, str]) -> None:
    for variable in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK"):
        if environ.get(variable):
            raise LaunchError(
                f"{variable} is {environ[variable]!r}: another launcher started this one, once "
                "per rank; remove distribution= from the estimator."
            )


def report(
    verdict: Verdict, outcome: Outcome | None, cluster: Cluster, environ: Mapping[str, str]
) -> Ending:
    """Say how the job ended, for people and for SageMaker.

    The verdict is that of all hosts, where they talk; the outcome is what happened on this one,
    if torchrun was started.
    """
    host = cluster.current_host
    if verdict.exit_code == 0 and outcome:
        log(f"{host}: every rank succeeded, {outcome.seconds:.0f} s after start.")
    elif verdict.stop_signal:
        log(f"{host}: stopped by {signal_name(verdict.stop_signal)}.")
    else:
        for line in verdict.text.splitlines()[:2]:
            log(line.removeprefix("launcher: "))
        failure.write_failure(verdict.text, environ)
    return Ending(verdict.exit_code, was_stopped=bool(verdict.stop_signal))
