"""Starts torchrun, passes signals on, waits, and leaves nothing of the job behind.

torchrun runs in a session of its own with the launcher's stdin, stdout and stderr. One loop
waits for its end, for signals and for what the ranks report; nothing polls while a job runs.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from launcher.errors import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, LaunchError, log
from launcher.failure import RESTARTED, Outcome, RankFailure, failure_text, in_order
from launcher.options import EXIT_BARRIER, RUN_DIR
from launcher.plan import LaunchPlan
from launcher.reports import Rank, Reports
from launcher.signals import Signals, reap, signal_name

if TYPE_CHECKING:
    import psutil

    from launcher.failure import Verdict
    from launcher.peers import Peers  # one host needs none, nor the 7 ms to import it

# torchrun ends what ignores a stop when the grace is over; this many seconds later we do.
_MARGIN = 5
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run(
    plan: LaunchPlan, environ: Mapping[str, str], signals: Signals, peers: Peers | None = None
) -> Outcome:
    """Run this host's torchrun to its end, and with peers until it is known how all hosts end.

    Raises LaunchError (exit code 126, 127 or 2) where it cannot be started.
    """
    with _run_dir(environ) as run_dir:
        return _Supervisor(plan, signals, peers).run(run_dir, environ)


@contextlib.contextmanager
def _run_dir(environ: Mapping[str, str]) -> Iterator[str]:
    """Make the job's folder for its socket and torchrun's temporary files; remove it after."""
    parent = environ.get("TMPDIR") or "/tmp"
    if len(os.fsencode(parent)) > 60:
        parent = "/tmp"  # a socket's path has at most 107 bytes (unix(7))
    folder = os.path.join(parent, f"sm-launch-{os.getpid()}-{time.time_ns():x}")
    try:
        os.mkdir(folder, 0o700)  # only if it is not there
    except OSError as error:
        raise LaunchError(
            f"cannot make a folder in {parent} ({error.strerror}); set TMPDIR to one where I can."
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Supervisor:
    """The state of one run: what is known, and what is to be done by when."""

    def __init__(self, plan: LaunchPlan, signals: Signals, peers: Peers | None) -> None:
        self._plan = plan
        self._signals = signals
        self._peers = peers
        self._judged = False  # the verdict of all hosts is known, and acted on
        self._host = plan.cluster.current_host
        self._selector = selectors.DefaultSelector()
        self._reports: Reports
        self._agent: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None  # torchrun's
        self._strangers: set[int] = set()  # children that were there before the job
        self._started_ranks: set[int] = set()  # local ranks of this attempt
        self._noted: list[RankFailure] = []
        self._stop_signal = 0
        self._deadline: float | None = None  # when torchrun and all it runs is killed
        self._sweep_by: float | None = None  # when what torchrun left behind is
        self._interrupts: list[float] = []  # when SIGINT came
        self._ending = False  # by us, past torchrun: what ranks die of now is no cause

    def run(self, run_dir: str, environ: Mapping[str, str]) -> Outcome:
        """Start torchrun, wait for its end, then see that nothing of the job is left."""
        started = time.monotonic()
        self._reports = Reports(run_dir, self._selector, self)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        if self._peers:
            self._selector.register(self._peers, selectors.EVENT_READ, lambda: None)
        try:
            environment = {**environ, **self._plan.environment, RUN_DIR: run_dir}
            if self._peers:
                # Nobody leaves a host that still trains, however long it does. In seconds; torch
                # counts 2**31 ms at most.
                environment.setdefault(EXIT_BARRIER, str(20 * 86400))
            self._start(environment)
            while self._returncode is None:
                self._wait(None)
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._on_deadline()
            seconds = time.monotonic() - started
            while self._wait(0):
                pass  # what was said last is still to be heard
            self._ending = True
            outcome = self._outcome(seconds)
            if self._peers and outcome.returncode and not self._stop_signal:
                self._tell(outcome, self._peers)
            self._sweep()
            if self._peers:
                self._settle(outcome, self._peers)
            return outcome
        finally:
            if self._agent is not None and self._returncode is None:
                self._kill()  # something went wrong in here, which must not leave a job behind
            self._reports.close()
            self._selector.close()

    def _outcome(self, seconds: float) -> Outcome:
        assert self._returncode is not None
        failures = in_order(self._noted, self._reports.reported())
        if self._reports.torchrun_error and all(f.exit_code == -signal.SIGTERM for f in failures):
            failures = ()  # it ended them because it could not go on itself
        return Outcome(
            returncode=self._returncode,
            failures=failures,
            stop_signal=self._stop_signal,
            torchrun_error=self._reports.torchrun_error,
            seconds=seconds,
        )

    def _start(self, environment: Mapping[str, str]) -> None:
        if self._reap():
            # A shell that started something and then became the launcher (exec).
            self._strangers = {process.pid for process in self._descendants()}
        _become_subreaper()
        argv = self._plan.argv
        try:
            self._agent = subprocess.Popen(argv, env=environment, start_new_session=True)
        except FileNotFoundError:
            raise LaunchError(f"{argv[0]} is not there.", exit_code=EXIT_NOT_FOUND) from None
        except OSError as error:
            raise LaunchError(
                f"cannot execute {argv[0]}: {error.strerror}.", exit_code=EXIT_CANNOT_EXECUTE
            ) from None

    def _wait(self, timeout: float | None) -> bool:
        """Act on what happens within timeout seconds (None: until the deadline)."""
        if timeout is None and self._deadline is not None:
            timeout = max(0.0, self._deadline - time.monotonic())
        due = self._peers.timeout() if self._peers else None
        if due is not None:
            timeout = due if timeout is None else min(due, timeout)
        events = self._selector.select(timeout)
        for key, _ in events:
            key.data()
        if self._peers:
            self._peers.act()
            if self._peers.verdict and not self._judged:
                self._judged = True
                self._on_verdict(self._peers.verdict)
        return bool(events)

    def _in(self, seconds: float) -> float:
        return time.monotonic() + seconds

    # Signals

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                self._reap()
                continue
            now = time.monotonic()
            if number == signal.SIGINT:
                self._interrupts = [at for at in self._interrupts if now - at < 2] + [now]
            if len(self._interrupts) > 2 and number == signal.SIGINT:
                # A person at a terminal, who wants no more of it.
                log("SIGINT for the third time within 2 s: killing the job at once.")
                self._ending = True
                self._kill()
            elif self._stop_signal:
                log(f"{signal_name(number)} again; the ranks keep their time to save.")
            elif self._peers and self._returncode == 0 and not self._judged:
                log(f"{signal_name(number)} while the other hosts go on: stopping them.")
                self._peers.stop(number)
            elif self._noted or self._judged or self._returncode is not None:
                log(f"{signal_name(number)}; the job is ending already.")
            else:
                self._stop(number)

    def _reap(self) -> bool:
        """Take in ended children, adopted ones too; tell whether there are any left."""
        ended, left = reap()
        if self._agent is not None and self._agent.pid in ended:
            self._returncode = self._agent.returncode = ended[self._agent.pid]
        return left

    def _stop(self, number: int) -> None:
        """Pass a stop on to torchrun, which passes it on to each rank's process group.

        Never to the ranks past it: torchrun takes a rank that ends by itself for a failure.
        """
        assert self._agent is not None
        grace = self._plan.grace
        log(f"{signal_name(number)}: stopping; the ranks of {self._host} have {grace} s to save.")
        self._stop_signal = number
        if self._peers:
            self._peers.stop(number)
        # Where no rank runs there is nothing to wait for: torchrun may be in its exit barrier,
        # which takes no notice of signals.
        self._deadline = self._in((grace if self._reports.alive else 0) + _MARGIN)
        self._sweep_by = self._in(grace)
        os.kill(self._agent.pid, number)  # not reaped yet, so the process is still there

    # Ranks (reports.Listener)

    def on_start(self, rank: Rank) -> None:
        """Note that a rank runs; one that ran before tells of torchrun's restart."""
        if self._stop_signal:
            # It started in between.
            self._deadline = self._in(self._plan.grace + _MARGIN)
            self._sweep_by = self._in(self._plan.grace)
        elif rank.local_rank in self._started_ranks and not self._judged:
            self._started_ranks.clear()
            self._noted.clear()
            self._deadline = self._sweep_by = None
        self._started_ranks.add(rank.local_rank)

    def on_failure(self, rank: Rank, failure: RankFailure) -> None:
        """Note what a rank failed with, if that is what it was."""
        headline = failure.headline(self._host)
        # How torchrun ends the ranks that it restarts, on all hosts when one of another failed.
        restarting = rank.max_restarts > 0 and failure.exit_code == -signal.SIGTERM
        if self._ending or (self._judged and not self._stop_signal):
            return
        if self._stop_signal:
            if failure.exit_code not in (-self._stop_signal, 128 + self._stop_signal):
                log(f"while stopping: {headline}.")
        elif rank.restart < rank.max_restarts and not restarting:
            log(f"{headline}; torchrun restarts it.")
            if self._peers:
                self._tell(Outcome(1, (failure,), seconds=failure.time), self._peers, RESTARTED)
        elif not restarting:
            self._noted.append(failure)
            if self._peers and self._peers.verdict is None:
                self._tell(Outcome(1, (failure,), seconds=failure.time), self._peers)
            if self._deadline is None:
                # To be gone itself.
                self._deadline = self._sweep_by = self._in(self._plan.failure_grace)

    def on_end(self, rank: Rank) -> None:
        """Give the others their time from now on: only now torchrun tells them to end."""
        if self._ending:
            return
        if rank.failure in self._noted[:1]:
            self._deadline = self._sweep_by = self._in(self._plan.failure_grace)
        elif self._stop_signal and not self._reports.alive:
            self._deadline = self._in(_MARGIN)  # torchrun may wait for other hosts, and be deaf

    # Other hosts

    def _tell(self, outcome: Outcome, peers: Peers, kind: int | None = None) -> None:
        """Make a case of how this host failed."""
        text = failure_text(outcome, self._plan.cluster, self._plan.rdzv_endpoint)
        peers.case(outcome.kind if kind is None else kind, outcome.exit_code, text)

    def _on_verdict(self, verdict: Verdict) -> None:
        """End as all hosts do, if that is not what this one is doing already."""
        if self._returncode is not None or self._agent is None or verdict.exit_code == 0:
            return
        if verdict.stop_signal:
            if not self._stop_signal:
                self._stop(verdict.stop_signal)
        elif not self._noted and not self._stop_signal:
            log(f"ending the ranks of {self._host}: {verdict.text.partition(chr(10))[0]}")
            self._deadline = self._sweep_by = self._in(self._plan.failure_grace)
            # A torchrun that waits for a store which is gone, or for other hosts at its end, hears
            # nothing; _sweep tells what it leaves.
            deaf = not self._reports.alive or (self._peers and self._peers.store_is_lost)
            os.kill(self._agent.pid, signal.SIGKILL if deaf else signal.SIGTERM)

    def _settle(self, outcome: Outcome, peers: Peers) -> None:
        """Wait until it is known how all hosts end: those that succeed leave together."""
        if outcome.returncode == 0:
            peers.done()
        self._deadline = None
        while peers.verdict is None:
            self._wait(None)

    # The end

    def _on_deadline(self) -> None:
        """End the rank that failed, if it is still there; else all that is left of the job."""
        assert self._agent is not None
        stuck = [rank for rank in self._reports.alive if rank.failure in self._noted[:1]]
        if self._ending:
            self._kill()
        elif stuck:
            log(f"rank {stuck[0].rank} has failed but does not end: killing it with SIGKILL.")
            self._deadline = self._in(self._plan.failure_grace + _MARGIN)
            with contextlib.suppress(ProcessLookupError):
                os.kill(stuck[0].pid, signal.SIGKILL)
        elif not self._reports.alive:
            # What ranks have left behind may have time yet; _sweep sees to it.
            log("no rank runs any more, but torchrun does not end: killing it with SIGKILL.")
            self._deadline = self._in(_MARGIN)
            os.kill(self._agent.pid, signal.SIGKILL)
        else:
            self._kill()

    def _kill(self) -> None:
        """Kill all that is left of the job, torchrun too; again in a second, should it last."""
        left = self._descendants()
        if not self._ending:
            log(f"time is up: killing {len(left)} processes of the job with SIGKILL.")
        self._ending = True
        self._deadline = self._sweep_by = self._in(1)
        for process in left:
            _send(process, signal.SIGKILL)

    def _sweep(self) -> None:
        """End what outlived torchrun: SIGTERM, and SIGKILL when its grace is over."""
        if self._sweep_by is None:
            self._sweep_by = self._in(self._plan.failure_grace)
        told: set[int] = set()
        while self._reap():
            now = time.monotonic()
            left = self._descendants()
            if not left:
                return
            if now >= self._sweep_by + _MARGIN:
                log(f"{len(left)} processes of the job do not die; the kernel holds them.")
                return
            for process in left:
                if now >= self._sweep_by:
                    _send(process, signal.SIGKILL)
                elif process.pid not in told:
                    told.add(process.pid)
                    log(f"ending process {process.pid}, which the job left behind.")
                    _send(process, signal.SIGTERM)
            self._wait(0.05)

    def _descendants(self) -> list[psutil.Process]:
        """Return all processes of the job: with the subreaper, orphans are among them."""
        import psutil  # 15 ms of CPU that a job which leaves nothing behind need not spend

        children = psutil.Process().children(recursive=True)
        return [process for process in children if process.pid not in self._strangers]


def _become_subreaper() -> None:
    """Have orphans of the job become this process's children, to be found and reaped."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _send(process: psutil.Process, number: int) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):  # it may be gone by now
        process.send_signal(number)
