"""Starts torchrun, passes signals on, waits, and leaves nothing of the job behind.

torchrun runs in a session of its own with the launcher's stdin, stdout and stderr. One loop
waits for its end, for signals and for what the ranks report; nothing polls while a job runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from launcher.errors import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, LaunchError, log
from launcher.job.options import EXIT_BARRIER, RUN_DIR, flag
from launcher.job.plan import LaunchPlan
from launcher.processes import HANDLES, IGNORES, Processes, response, send, session
from launcher.result.failure import (
    ECHO_PATIENCE,
    RESTARTED,
    Outcome,
    RankFailure,
    failure_text,
    in_order,
)
from launcher.run.reports import ERROR, FAILURE, RESTART, Rank, Reports
from launcher.signals import Signals, reap, signal_name

if TYPE_CHECKING:
    from launcher.peers.channel import Peers  # one host needs none, nor the 7 ms to import it
    from launcher.result.failure import Verdict

# All in seconds. torchrun kills what ignores a stop when the grace is over; so much later we do.
_MARGIN = 5
# For a sys.excepthook to choose a rank's exit code, before the other hosts are told without it.
_TO_BE_CERTAIN = 2.5


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
    length, too_long = len(os.fsencode(parent)), ""
    if length > 60:  # a socket's path has at most 107 bytes (unix(7))
        parent = "/tmp"
        too_long = f"TMPDIR is too long for a socket in it ({length} bytes; expected at most 60)"
        log(f"{too_long}: {parent} is used instead.")
    folder = os.path.join(parent, f"sm-launch-{os.getpid()}-{time.time_ns():x}")
    try:
        os.mkdir(folder, 0o700)  # only if it is not there
    except OSError as error:
        what = f"cannot make a folder in {parent} ({error.strerror})"
        mend = "set TMPDIR to a folder where I can, with a path of at most 60 bytes"
        raise LaunchError(f"{too_long and too_long + '; '}{what}; {mend}.") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Supervisor:
    """The state of one run: what is known, and what is to be done by when.

    Times are on the clock time.monotonic(), infinite where nothing is due.
    """

    def __init__(self, plan: LaunchPlan, signals: Signals, peers: Peers | None) -> None:
        self._plan = plan
        self._signals = signals
        self._peers = peers
        self._judged = False  # the verdict of all hosts is known, and acted on
        self._host = plan.cluster.current_host
        self._selector = selectors.DefaultSelector()
        self._reports: Reports
        self._processes: Processes
        self._agent: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None  # torchrun's
        self._noted: dict[int, RankFailure] = {}  # failures of this attempt by rank, first first
        self._untold: list[Rank] = []  # failed, but with which exit code is not certain yet
        self._tell_at = math.inf
        self._closing = ""  # why torchrun is ending the ranks
        self._closing_at = math.inf
        self._hold_until = math.inf  # torchrun waits to end the ranks, for a better cause
        self._clear_by = math.inf  # torchrun waits for what its last attempt left to be gone
        self._stop_signal = 0
        self._deadline = math.inf  # when torchrun and all it runs is killed
        self._sweep_by = math.inf  # when what torchrun left behind is killed
        self._started = time.monotonic()
        self._interrupts: list[float] = []  # when SIGINT came
        self._ending = False  # by us, past torchrun: what ranks die of now is no cause

    def run(self, run_dir: str, environ: Mapping[str, str]) -> Outcome:
        """Start torchrun, wait for its end, then see that nothing of the job is left."""
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
                self._wait(math.inf)
                if self._returncode is None and time.monotonic() >= self._deadline:
                    self._on_deadline()
            seconds = time.monotonic() - self._started
            while self._wait(0):
                pass  # what was said last is still to be heard
            self._tell_certain(everything=True)
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
        reported = () if self._closing == ERROR else self._reports.reported()
        return Outcome(
            returncode=self._returncode,
            failures=in_order(
                tuple(self._noted.values()), reported, self._closing_at - self._started
            ),
            stop_signal=self._stop_signal,
            torchrun_error=self._reports.torchrun_error,
            seconds=seconds,
        )

    def _start(self, environment: Mapping[str, str]) -> None:
        self._processes = Processes()
        argv = self._plan.argv
        try:
            self._agent = subprocess.Popen(argv, env=environment, start_new_session=True)
        except FileNotFoundError:
            raise LaunchError(f"{argv[0]} is not there.", exit_code=EXIT_NOT_FOUND) from None
        except OSError as error:
            raise LaunchError(
                f"cannot execute {argv[0]}: {error.strerror}.", exit_code=EXIT_CANNOT_EXECUTE
            ) from None
        if self._peers:
            self._peers.give_back_limit(self._agent.pid)

    def _wait(self, seconds: float) -> bool:
        """Act on what happens within so many seconds, or until something is due."""
        due = min(self._deadline, self._tell_at, self._hold_until)
        seconds = min(seconds, max(0.0, due - time.monotonic()))
        for other in (self._reports, self._peers):
            timeout = other.timeout() if other else None
            seconds = seconds if timeout is None else min(seconds, timeout)
        if self._clear_by < math.inf:
            seconds = min(seconds, 0.05)
        events = self._selector.select(None if math.isinf(seconds) else seconds)
        for key, _ in events:
            key.data()
        self._reports.look()
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_certain(everything=True)
        if now >= self._hold_until:
            self._let_torchrun_end_ranks(FAILURE)
        if self._clear_by < math.inf:
            self._clear()
        if self._peers:
            self._peers.act()
            if self._peers.verdict and not self._judged:
                self._judged = True
                self._on_verdict(self._peers.verdict)
        return bool(events)

    def _in(self, seconds: float) -> float:
        return time.monotonic() + seconds

    @property
    def _pid(self) -> int:
        """Torchrun's."""
        assert self._agent is not None
        return self._agent.pid

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
        """Pass a stop on to torchrun, which passes it on to each rank's own process.

        Never to the ranks past it: torchrun takes a rank that ends by itself for a failure.
        """
        grace = self._plan.grace
        log(f"{signal_name(number)}: stopping; the ranks of {self._host} have {grace} s to save.")
        self._stop_signal = number
        if self._peers:
            self._peers.stop(number)
        for rank in self._reports.alive:
            rank.at_stop = response(rank.pid, number)
            if rank.at_stop == IGNORES and number in (signal.SIGINT, signal.SIGQUIT):
                # As os.system does while it waits for another program, which is to hear it.
                self._tell_group(rank)
        # Where no rank runs there is nothing to wait for: torchrun may be in its exit barrier,
        # which takes no notice of signals.
        self._deadline = self._in((grace if self._reports.alive else 0) + _MARGIN)
        self._sweep_by = self._in(grace)
        os.kill(self._pid, number)  # not reaped yet, so the process is still there

    # Ranks and torchrun (reports.Listener)

    def on_start(self, rank: Rank) -> None:
        """Give a rank that has started after a stop its time to save."""
        if self._stop_signal:
            self._deadline = self._in(self._plan.grace + _MARGIN)
            self._sweep_by = self._in(self._plan.grace)

    def on_failure(self, rank: Rank) -> None:
        """Note what a rank failed with, if that is what it was."""
        assert rank.failure
        if self._ending or self._closing in (RESTART, ERROR):
            return
        if self._stop_signal:
            self._on_failure_while_stopping(rank, rank.failure)
        elif self._judged:
            return
        elif rank.exit_code == 0:
            self._withdraw(rank)
        elif rank.restart < rank.max_restarts:
            if rank.exit_code is not None:
                log(f"{rank.failure.headline(self._host)}; torchrun restarts it.")
                if self._peers:
                    outcome = Outcome(1, (rank.failure,), seconds=rank.failure.time)
                    self._tell(outcome, self._peers, RESTARTED)
        else:
            if not self._noted:
                # How long the rank itself may take to end.
                self._deadline = self._sweep_by = self._in(self._plan.failure_grace)
            self._noted[rank.rank] = rank.failure
            if rank not in self._untold:
                self._untold.append(rank)
            self._tell_at = min(self._tell_at, self._in(_TO_BE_CERTAIN))
            self._tell_certain()
            if self._hold_until < math.inf and not self._wants_better_cause():
                self._let_torchrun_end_ranks(FAILURE)

    def _withdraw(self, rank: Rank) -> None:
        """A rank raised, but its own hook ended it with 0: it has not failed."""
        self._noted.pop(rank.rank, None)
        if rank in self._untold:
            self._untold.remove(rank)
        if not self._noted:
            self._deadline = self._sweep_by = math.inf

    def _on_failure_while_stopping(self, rank: Rank, failure: RankFailure) -> None:
        died_of_it = rank.exit_code == -self._stop_signal
        # Python's own handler of SIGINT saves nothing.
        if died_of_it and (rank.at_stop != HANDLES or self._stop_signal == signal.SIGINT):
            # Nothing of it is saved: it may be that it only started another program, which has not
            # heard of the stop yet.
            self._tell_group(rank)
        elif died_of_it:
            pass  # as programs end that have handled it
        elif rank.exit_code not in (None, 0, 128 + self._stop_signal):
            log(f"while stopping: {failure.headline(self._host)}.")

    def _tell_group(self, rank: Rank) -> None:
        """Pass a stop on to what a rank has started."""
        for process in self._processes.of_group(rank.pid):
            send(process, self._stop_signal)

    def on_end(self, rank: Rank) -> None:
        """See what is left to wait for when a rank's process is gone."""
        if self._ending:
            return
        if self._noted and rank.rank == next(iter(self._noted)) and not self._closing:
            self._sweep_by = self._in(self._plan.failure_grace)
            # torchrun is about to see it.
            self._deadline = max(self._sweep_by, self._in(_MARGIN))
        elif self._stop_signal and not self._reports.alive:
            self._deadline = self._in(_MARGIN)  # torchrun may wait for other hosts, and be deaf

    def on_closing(self, why: str) -> None:
        """Let torchrun end the ranks, but wait a moment first where only echoes are known.

        A rank that cleans up before it reports its error would otherwise be killed without a word,
        because another rank saw the broken connection first.
        """
        if why == FAILURE and not self._judged and self._wants_better_cause():
            self._hold_until = self._in(ECHO_PATIENCE)
            self._deadline = math.inf
        else:
            self._let_torchrun_end_ranks(why)

    def _wants_better_cause(self) -> bool:
        failures = self._noted.values()
        only_echoes = bool(failures) and all(failure.is_secondary for failure in failures)
        return only_echoes and bool(self._reports.alive)

    def _let_torchrun_end_ranks(self, why: str) -> None:
        """Answer torchrun: from now on ranks end because it ends them, within their grace."""
        self._hold_until = math.inf
        self._closing = why
        self._closing_at = time.monotonic()
        if self._stop_signal:
            self._reports.answer(self._plan.grace)
        elif why == RESTART:
            self._reports.answer()
        else:
            self._deadline = self._sweep_by = self._in(self._plan.failure_grace)
            self._reports.answer(self._plan.failure_grace + _MARGIN)
            if why == ERROR and self._peers:
                text = self._reports.torchrun_error
                seconds = time.monotonic() - self._started
                self._tell(Outcome(1, torchrun_error=text, seconds=seconds), self._peers)

    def on_starting(self) -> None:
        """End what the ranks of the last attempt have left, before there are new ones."""
        self._noted.clear()
        self._untold.clear()
        if not self._stop_signal:
            self._deadline = self._sweep_by = math.inf
        self._clear_by = self._in(self._plan.failure_grace)
        for process in self._processes.left_behind(self._pid):
            log(f"ending process {process.pid}, which the last attempt left behind.")
            send(process, signal.SIGTERM)
        self._clear()

    def _clear(self) -> None:
        """Let torchrun start ranks again once nothing of the last attempt is left."""
        self._reap()
        left = self._processes.left_behind(self._pid)
        now = time.monotonic()
        if left and now < self._clear_by + _MARGIN:
            for process in left if now >= self._clear_by else ():
                send(process, signal.SIGKILL)
            return
        self._clear_by = self._closing_at = math.inf
        self._closing = ""
        self._reports.answer()

    # Other hosts

    def _tell_certain(self, *, everything: bool = False) -> None:
        """Tell the other hosts of the ranks that failed, once their exit codes are certain."""
        for rank in list(self._untold):
            if rank.exit_code is not None or everything:
                self._untold.remove(rank)
                if self._peers and self._peers.verdict is None and rank.failure:
                    outcome = Outcome(1, (rank.failure,), seconds=rank.failure.time)
                    self._tell(outcome, self._peers)
        if not self._untold:
            self._tell_at = math.inf

    def _tell(self, outcome: Outcome, peers: Peers, kind: int | None = None) -> None:
        """Make a case of how this host failed."""
        text = failure_text(outcome, self._plan.cluster, self._plan.rdzv_endpoint)
        peers.case(outcome.kind if kind is None else kind, outcome.exit_code, text)

    def _on_verdict(self, verdict: Verdict) -> None:
        """End as all hosts do, if that is not what this one is doing already."""
        if self._hold_until < math.inf:
            self._let_torchrun_end_ranks(FAILURE)
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
            os.kill(self._pid, signal.SIGKILL if deaf else signal.SIGTERM)

    def _settle(self, outcome: Outcome, peers: Peers) -> None:
        """Wait until it is known how all hosts end: those that succeed leave together."""
        if outcome.returncode == 0:
            peers.done()
        while peers.verdict is None:
            self._wait(math.inf)

    # The end

    def _on_deadline(self) -> None:
        """End the rank that failed, if it is still there; else all that is left of the job."""
        first = next(iter(self._noted), None)
        stuck = [rank for rank in self._reports.alive if rank.rank == first]
        if self._ending:
            self._kill()
        elif stuck and not self._closing:
            log(
                f"rank {first} has failed but still runs {self._plan.failure_grace} s later: "
                f"killing it with SIGKILL ({flag('failure_grace')} is its time to end)."
            )
            self._deadline = self._in(self._plan.failure_grace + _MARGIN)
            with contextlib.suppress(OSError):  # gone, or another user's by now
                os.kill(stuck[0].pid, signal.SIGKILL)
        elif not self._reports.alive:
            # What ranks have left behind may have time yet; _sweep sees to it.
            log("no rank runs any more, but torchrun does not end: killing it with SIGKILL.")
            self._deadline = self._in(_MARGIN)
            os.kill(self._pid, signal.SIGKILL)
        else:
            self._kill()

    def _kill(self) -> None:
        """Kill all that is left of the job, torchrun too; again in a second, should it last."""
        left = self._processes.all()
        if not self._ending:
            log(f"time is up: killing {len(left)} processes of the job with SIGKILL.")
        self._ending = True
        self._deadline = self._sweep_by = self._in(1)
        for process in left:
            send(process, signal.SIGKILL)

    def _sweep(self) -> None:
        """End what outlived torchrun: SIGTERM, and SIGKILL when its grace is over.

        After a stop, what ranks have left (an upload, say) has the rest of the grace, and SIGTERM
        comes only near its end.
        """
        self._deadline = self._hold_until = math.inf  # which were for torchrun
        if self._sweep_by == math.inf:
            self._sweep_by = self._in(self._plan.failure_grace)
        tell_at = 0.0
        if self._stop_signal:
            tell_at = self._sweep_by - min(_MARGIN, self._plan.grace / 4)
        told: set[int] = set()
        said = False
        while self._reap():
            now = time.monotonic()
            left = self._processes.all()
            if not left:
                return
            if now >= self._sweep_by + _MARGIN:
                log(f"{len(left)} processes of the job do not die; the kernel holds them.")
                return
            if now >= self._sweep_by:
                for process in left:
                    send(process, signal.SIGKILL)
            elif now >= tell_at or (self._reports.alive and not self._closing):
                # In a stop: torchrun was killed before it could pass it on.
                # Ranks, and not what those have started that still run.
                ranks = {rank.pid for rank in self._reports.alive}
                for process in left:
                    if process.pid in told or session(process.pid) in ranks - {process.pid}:
                        continue
                    told.add(process.pid)
                    log(f"ending process {process.pid}, which the job left behind.")
                    send(process, signal.SIGTERM)
            elif not said:
                said = True
                seconds = self._sweep_by - now
                log(f"{len(left)} processes that ranks left behind have {seconds:.0f} s to end.")
            # The end of each one is told by SIGCHLD: whoever is left becomes a child of ours.
            self._wait(max(0.05, tell_at - now))
