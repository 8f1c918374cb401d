"""PID 1 of a container: `sm-launch init COMMAND` runs a command and passes stops on.

SageMaker stops a job with SIGTERM to PID 1, and with SIGKILL 120 s later. Its toolkit's `train`
ignores SIGTERM as PID 1. Behind an init such as tini it would die of SIGTERM at once, and the
container would end while ranks save. So this init knows whether a launcher runs somewhere below
the command: each launcher connects to its Unix socket (presence.py), and says how it ends.

- A stop goes to the launchers that run; if none runs, to the command.
- This process ends when the command and all launchers have ended. It reaps the orphans that the
  kernel gives to PID 1.
- Its exit code is the command's or, as the toolkit makes 1 of every failure, and `| tee` 0, the
  last launcher's: `of_container` of result/causes.py decides.
- A command that fails for a reason that no launcher has written has it written here. If it never
  started a launcher, the first host is told, which would wait for this one.
- A failure file that the toolkit wrote because a launcher was stopped is removed: the toolkit takes
  every exit code but 0 for a failure. A host that is stopped because another one was gets no signal
  here; its launcher says that it was stopped.

How a SIGTERM to PID 1 reaches each rank of its host (a launcher that is PID 1 begins with 2):

1. Here: `_Init._on_signals` and `_stop` send it to the launchers in `LauncherRegistry`, where each
   has connected from cli.py's `main`, by `registered` (presence.py), once its `Signals` note stops.
2. run/supervisor.py: `Supervisor._on_signals` notes it; `_take_signals` makes it the event
   `Signal`.
3. run/machine.py: `signalled` and `_stop` begin the phase `Ending` with `Why.STOP`, if ranks run.
4. run/machine.py: `_end` gives the action `EndRanks`; `Keepers.end` (run/keepers.py) sends it to
   the keepers of all ranks.
5. run/keeper.py: `_end` sends the signal to the rank's script, once.

In step 3 `Report(Stop)` also goes to the coordinator, whose `End` is to other hosts what `Signal`
is here, unless a failure was known before.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from launcher.container.presence import KILLED, LauncherRegistry
from launcher.errors import STOPS, CommandFailedError, LaunchError
from launcher.host.cgroups import oom_kills, risen
from launcher.host.processes import reap, send, start
from launcher.host.signals import Signals, left_alone
from launcher.host.system import System
from launcher.job import toolkit
from launcher.job.options import INIT, KEEP_EXIT_CODE
from launcher.job.prepare import prepare
from launcher.result.causes import SUCCESS, Result, of_container
from launcher.result.failure import version_of
from launcher.run import supervisor
from launcher.text.log import log
from launcher.text.words import shortened, signal_name

_TRAIN = "train"  # the toolkit's program, with which SageMaker starts every image
# Seconds that `train` has to finish, an upload for example, when a stop comes after the job's end.
_FINISH_SECONDS = 10
_COMMAND = 200  # characters of a command in a message

# How the last launcher has ended that has written no reason, as messages say it.
_WITHOUT_REASON: Mapping[Result | None, str] = {
    None: "and never started a launcher",
    SUCCESS: "after its launcher had succeeded",
    KILLED: "and its launcher was killed",
}


def run(command: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Run a command as PID 1 does; return the container's exit code, and how the job ended.

    Raises LaunchError if the command cannot be started (exit code 126 or 127), before the
    toolkit's `train` if the job's config files are unusable (2), and, with its exit code, if the
    command fails for a reason that no launcher has written.
    """
    if is_train(command):
        # The toolkit would say so with a traceback, and end with 1.
        toolkit.read_config({**environ, toolkit.BASE_DIR_VARIABLE: toolkit.base_dir(environ)})
    init = _Init(command, signals)
    try:
        return init.run(environ)
    except LaunchError as error:
        if init.launchers.result is None:
            _tell_first_host(error, environ, signals)
        raise


def is_train(command: Sequence[str]) -> bool:
    """Tell whether a command is the toolkit's `train`."""
    # SageMaker's word comes last, behind what an image has in front of it.
    return os.path.basename(command[-1]) == _TRAIN


class _Init:
    def __init__(self, command: Sequence[str], signals: Signals) -> None:
        self._command, self._signals = command, signals
        self._selector = selectors.DefaultSelector()
        self.launchers = LauncherRegistry(self._selector)
        self._process: subprocess.Popen[bytes]
        self._stop_signal = 0  # the first one
        self._finish_deadline: float | None = None  # `train`: the job has ended, and a stop came

    def run(self, environ: Mapping[str, str]) -> Result:
        """Start the command and wait until it and the launchers have ended."""
        output = os.path.join(toolkit.base_dir(environ), "output")
        failure_file = os.path.join(output, "failure")
        before, kills = version_of(failure_file), oom_kills()
        hint = "; install sagemaker-training, or use the entry point `sm-launch` without `init`"
        self._process = start(
            self._command,
            {**environ, INIT: self.launchers.name},
            hint=hint if self._command[0] == _TRAIN else "",
        )
        self._selector.register(self.launchers, selectors.EVENT_READ, self._accept)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        while self._process.returncode is None or self.launchers.pids:
            timeout = self._finish_deadline and max(0.0, self._finish_deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            if self._finish_deadline and time.monotonic() >= self._finish_deadline:
                self._finish_deadline = None
                self._end_command()
        reported = self.launchers.result
        if reported and reported.stop_signal and version_of(failure_file) != before:
            _remove_failure(failure_file, reported.exit_code)
        # The toolkit writes `success`, or `failure`. What it raises because it cannot write that is
        # lost, and it ends with 0 (trainer.py): SageMaker would take the job for completed.
        is_toolkit = is_train(self._command) and "SAGEMAKER_TRAINING_MODULE" in environ
        result = of_container(
            self._process.returncode,
            reported,
            self._stop_signal,
            hides_failure=is_toolkit and not os.path.exists(os.path.join(output, "success")),
            keeps_code=environ.get(KEEP_EXIT_CODE, "").lower() in ("1", "true"),
        )
        is_stop = self._stop_signal or result.stop_signal
        if result.exit_code and not is_stop and reported in _WITHOUT_REASON:
            oom = risen(kills, oom_kills())
            raise CommandFailedError(self._reason(reported, oom), result.exit_code)
        if result.exit_code and self._process.returncode == 0 and not is_stop:
            log(
                f"the last launcher ended with exit code {result.exit_code} and {self._command[0]} "
                f"with 0: this container ends with {result.exit_code} ({KEEP_EXIT_CODE}=1: with 0)."
            )
        return result

    def _accept(self) -> None:
        for pid in self.launchers.accept():
            if self._stop_signal:
                send(pid, self._stop_signal)  # the launcher has come too late to train

    def _on_signals(self) -> None:
        self._accept()  # a launcher that has just come counts
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                reap(self._process)
            elif number in STOPS:
                self._stop(number)
            else:
                log(left_alone(number))

    def _stop(self, number: int) -> None:
        """Pass a stop on: to the launchers or, where none runs, to the command."""
        self._stop_signal = self._stop_signal or number
        sent = [send(pid, number) for pid in self.launchers.pids]
        if any(sent):
            return
        if self.launchers.result and is_train(self._command) and not self._finish_deadline:
            name, seconds = signal_name(number), _FINISH_SECONDS
            log(f"{name}: the job has ended; {_TRAIN} has {seconds} s to finish.")
            self._finish_deadline = time.monotonic() + _FINISH_SECONDS
        else:
            self._end_command()

    def _end_command(self) -> None:
        if self._process.returncode is None:
            number = self._stop_signal
            log(f"{signal_name(number)}: no launcher is running; stopping {self._command[0]}.")
            # The toolkit reports success after SIGINT, or just goes on (retrying.py, in its wait).
            send(self._process.pid, signal.SIGTERM if is_train(self._command) else number)

    def _reason(self, reported: Result | None, oom: str) -> str:
        """Return why the container fails, if no launcher knows."""
        code = self._process.returncode
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        command = shortened(" ".join(self._command), _COMMAND)
        why = f"{command} {how} {_WITHOUT_REASON[reported]}"
        return f"{why}; {oom and f'{oom}; '}see this host's log"


def _tell_first_host(error: LaunchError, environ: Mapping[str, str], signals: Signals) -> None:
    """Send the first host, if it is another one, what a host sends that cannot start.

    It gives up after a few seconds (UNHEARD_SECONDS): that host may have no launcher either.
    """
    seen = {**environ, "SM_NUM_GPUS": "0", "SM_NUM_NEURONS": "0"}  # drivers need not be asked
    # Some script has to be named, perhaps by a hyperparameter, as options may be, too.
    for words in (["--train-script", _TRAIN], []):
        with contextlib.suppress(LaunchError):
            job = prepare(words, seen, signals)
            if job and job.coordinator != job.current_host:
                with System(signals) as system:
                    supervisor.run(job._replace(plan=error), environ, system)
            return


def _remove_failure(path: str, exit_code: int) -> None:
    """Remove the toolkit's failure file if it says no more than that a launcher ended so."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        # As its errors.py writes it. 1: by way of a shell script, `sm-launch ... || exit 1`.
        if re.match(rf"\w+:\nExitCode ({exit_code}|1)\n", file.read(4096)):
            os.remove(path)
