"""What went wrong, in the words and the exit code that people see. Nothing is run here.

SageMaker shows the first 1,024 characters of /opt/ml/output/failure as FailureReason (AWS's
guide, "How Amazon SageMaker Processes Training Output"), so the cause comes first.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.errors import EXIT_HOST_LOST, EXIT_USAGE, log, printable
from launcher.job import toolkit
from launcher.job.cluster import Cluster
from launcher.job.options import flag
from launcher.result import raised
from launcher.result.raised import shortened
from launcher.signals import signal_name

LIMIT = 1024
# Failures within this many seconds happened at once, as far as anybody can tell.
_MOMENT = 1.0
# Kinds of causes, the better first: a rank that failed for a reason of its own, a host that was
# lost, a torchrun that failed, a rank that torchrun restarted, one that was aborted or ended by
# SIGTERM (perhaps because of another's death), one that said that it heard of another's death.
OWN, LOST, BROKEN, RESTARTED, ABORTED, ECHO = range(6)
# Seconds that the first host, and a torchrun, wait for a better cause than one of the last two.
ECHO_PATIENCE = 3.0


class RankFailure(NamedTuple):
    """How one rank of this host ended; `exit_code` is negative for a signal.

    `time` is in seconds since the launcher's start, infinite where only torchrun saw it. A rank
    that `said` why it ended raised, or called sys.exit; one that did not was killed, or called
    os._exit. `chain` is what it raised, as rank.py sends it (the fields of raised.Link).
    """

    rank: int
    local_rank: int
    exit_code: int
    chain: Sequence[Mapping[str, str]] = ()
    time: float = math.inf
    said: bool = False
    oom: str = ""  # whether the kernel counted a kill for want of memory, after a SIGKILL

    @property
    def links(self) -> tuple[raised.Link, ...]:
        """What it raised, as raised.py reads it."""
        return raised.read([raised.Link(**link) for link in self.chain])

    @property
    def is_secondary(self) -> bool:
        """Whether this reads like the echo of something that failed before.

        NCCL's watchdog aborts a process whose peer has died, and torchrun ends the ranks that it
        cannot go on with by SIGTERM.
        """
        if self.exit_code in (-signal.SIGABRT, -signal.SIGTERM) and not self.said:
            return True
        return raised.is_echo(self.links)

    def headline(self, host: str) -> str:
        """Return one line that says who failed, and with what."""
        how = raised.headline(self.links)
        if not how and self.exit_code < 0:
            how = f"was killed by {signal_name(-self.exit_code)}"
            how += f"; {self.oom}" if self.oom else ""
        how = how or f"ended with exit code {self.exit_code}"
        return printable(f"{host}, rank {self.rank} (local rank {self.local_rank}) {how}")


class Outcome(NamedTuple):
    """How this host's torchrun ended, and what its ranks said; times in seconds."""

    returncode: int  # torchrun's own; negative for a signal
    failures: tuple[RankFailure, ...] = ()  # the first cause first
    stop_signal: int = 0  # what a person or the platform stopped the job with
    torchrun_error: str = ""  # what torchrun raised for a reason of its own
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """The launcher's exit code (README.md, "Exit codes")."""
        if self.returncode == 0:
            return 0
        if self.stop_signal:
            return 128 + self.stop_signal
        if self.failures:
            code = self.failures[0].exit_code
            return 128 - code if code < 0 else code
        if self.returncode == EXIT_USAGE:
            return EXIT_USAGE  # torchrun did not take its arguments
        if self.returncode < 0 or self.torchrun_error.startswith("Rendezvous"):
            return EXIT_HOST_LOST
        return self.returncode

    @property
    def kind(self) -> int:
        """What kind of cause this host knows: OWN, BROKEN, ABORTED or ECHO."""
        if not self.failures:
            return BROKEN
        first = self.failures[0]
        return OWN if not first.is_secondary else ECHO if first.said else ABORTED


class Verdict(NamedTuple):
    """How the job ends: `text` is that of the failure file, "" if there is none to write."""

    exit_code: int
    text: str = ""
    stop_signal: int = 0


def in_order(
    noted: Sequence[RankFailure], reported: Sequence[RankFailure], closing: float = math.inf
) -> tuple[RankFailure, ...]:
    """Return the failures that count, the first cause first.

    `closing` is when torchrun began to end the others, infinite if that is not known.

    `noted` comes from the ranks themselves, with times; `reported` from torchrun, which knows
    exit codes but lists the siblings that it ended itself, and only in the order it looked.
    """
    codes = {failure.rank: failure.exit_code for failure in reported}
    failures = []
    for failure in noted:
        code = codes.pop(failure.rank, failure.exit_code)
        # A death by signal after it has said why is no better cause (as in reports.py).
        failures.append(failure._replace(exit_code=code) if code > 0 else failure)
    failures += [failure for failure in reported if failure.rank in codes]
    failures.sort(key=lambda failure: failure.time)
    # torchrun ends the others with SIGTERM at once, with SIGKILL when their grace is over. Only
    # where nothing else is known can such a death be the first cause, or in the same moment.
    ended = (-signal.SIGTERM, -signal.SIGKILL)
    silent = [f for f in failures if f.exit_code not in ended and math.isinf(f.time)]
    if failures and failures[0].exit_code in ended and silent:
        failures.remove(silent[0])
        failures.insert(0, silent[0])
    if not failures:
        return ()
    first = failures[0].time
    moment = -math.inf if math.isinf(first) else first + _MOMENT
    counted = failures[:1] + [
        failure
        for failure in failures[1:]
        if failure.exit_code not in ended
        or failure.time <= closing < math.inf
        or (failure.exit_code == -signal.SIGKILL and failure.time <= moment)
    ]
    better = _better_than(counted[0], counted[1:], moment, closing)
    if better:
        counted.remove(better)
        counted.insert(0, better)
    return tuple(counted)


def _better_than(
    first: RankFailure, later: Sequence[RankFailure], moment: float, closing: float
) -> RankFailure | None:
    """Return which of later failures is a better cause than an echo that came first, if any is."""
    if not first.is_secondary:
        return None
    for failure in later:
        untouched = failure.time <= closing < math.inf
        at_once = untouched or failure.time <= moment or math.isinf(failure.time)
        # An exit code that was chosen may be that of a handler for torchrun's SIGTERM.
        original = raised.is_own(failure.links) or not failure.said or untouched
        if at_once and original and not failure.is_secondary:
            return failure
    if first.said:
        return next((one for one in later if not one.said and one.time <= moment), None)
    return None


def failure_text(outcome: Outcome, cluster: Cluster, endpoint: str) -> str:
    """Return the text of the failure file, at most 1,024 characters, its first line the cause."""
    if not outcome.failures:
        return _torchrun_text(outcome, cluster, endpoint)
    first = outcome.failures[0]
    head = shortened(first.headline(cluster.current_host), 500)
    after = outcome.seconds if math.isinf(first.time) else first.time
    details = f"exit code {outcome.exit_code}, {after:.0f} s after start"
    count = len(outcome.failures)
    if count > 1:
        details += f"; first of {count} failures (ranks that the stop itself ended do not count)"
    text = f"{head}\n{details}\n"
    lines = [printable(line) for line in raised.frames(first.links).splitlines()]
    if lines:
        text += "Traceback (most recent call last):\n"
    # The innermost frames are the ones to keep.
    while lines and sum(len(line) + 1 for line in lines) > LIMIT - len(text):
        lines.pop(0)
    while lines and not lines[0].startswith("  File "):
        lines.pop(0)  # the rest of a frame
    return text + "".join(line + "\n" for line in lines)


def port_is_taken(endpoint: str) -> str:
    """Return what to say where torchrun's store on the first host finds its port taken."""
    return (
        f"the rendezvous port of {endpoint} is taken on this host; "
        f"choose another with {flag('rdzv_port')}, on every host alike"
    )


def _torchrun_text(outcome: Outcome, cluster: Cluster, endpoint: str) -> str:
    host = cluster.current_host
    error = printable(" ".join(outcome.torchrun_error.split())).rstrip(" :")
    if outcome.returncode < 0:
        what = f"{host}: torchrun was killed by {signal_name(-outcome.returncode)}"
    elif "EADDRINUSE" in error or "address already in use" in error.lower():
        what = f"{host}: {port_is_taken(endpoint)}"
    elif error.startswith("Rendezvous"):
        what = (
            f"{host}: the hosts did not all meet at {endpoint}, or one was lost "
            f"(see the other hosts' logs, and {flag('start_timeout')}); "
            f"expected {shortened(', '.join(cluster.hosts), 300)}"
        )
    else:
        what = f"{host}: torchrun failed"
    if error:
        what += f": {error}"
    details = f"exit code {outcome.exit_code}, {outcome.seconds:.0f} s after start"
    return f"{shortened(what, LIMIT - len(details) - 2)}\n{details}\n"


def output_dir(environ: Mapping[str, str]) -> str:
    """Return the folder that SageMaker reads the failure file from."""
    return environ.get("SM_OUTPUT_DIR") or os.path.join(toolkit.base_dir(environ), "output")


def write_failure(text: str, environ: Mapping[str, str], *, quiet: bool = False) -> str | None:
    """Write the failure file, never over one that is there; return its path if written.

    A folder that is missing or read-only costs a line in the log (none if quiet), not the job.
    """
    path = os.path.join(output_dir(environ), "failure")
    try:
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        if not quiet:
            log(f"{path} is there already; left as it is.")
    except OSError as error:
        if not quiet:
            log(f"warning: cannot write {path} ({error.strerror}).")
    else:
        return path
    return None
