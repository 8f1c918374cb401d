"""PID 1 of a container: `sm-launch init COMMAND` runs a command and passes stops on.

SageMaker stops a job with SIGTERM to PID 1, and with SIGKILL 120 s later. Its toolkit's `train`
ignores SIGTERM as PID 1. Behind an init such as tini it would die of SIGTERM at once, and the
container would end while ranks save. So this init knows whether a launcher runs somewhere below
the command: each launcher connects to its Unix socket (presence.py), and says how it ends.

- A stop goes to the launchers that run; if none runs, to the command.
- This process ends when the command and all launchers have ended. It reaps the orphans that the
  kernel gives to PID 1.
- Its exit code is the command's or, as the toolkit makes 1 of every failure, the last launcher's:
  `of_container` of result/causes.py decides.
- A failure file that the toolkit wrote because a launcher was stopped is removed: the toolkit takes
  every exit code but 0 for a failure. A host that is stopped because another one was gets no signal
  here; its launcher says that it was stopped.

How a SIGTERM to PID 1 reaches each rank of its host (a launcher that is PID 1 begins with 2):

1. Here: `_Init._on_signals` and `_stop` send it to the launchers in `LauncherRegistry`, where each
   has connected from cli.py's `main`, by `InitClient` (presence.py), once its `Signals` note stops.
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
import enum
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from launcher.container.presence import LauncherRegistry
from launcher.errors import STOPS
from launcher.host.processes import reap, send, start
from launcher.host.signals import Signals, left_alone
from launcher.job import toolkit
from launcher.job.options import INIT
from launcher.result.causes import Result, of_container
from launcher.result.failure import version_of
from launcher.text.log import log
from launcher.text.words import signal_name

_TRAIN = "train"  # the toolkit's program, with which SageMaker starts every image
# Seconds that `train` has to finish, an upload for example, when a stop comes after the job's end.
_FINISH_SECONDS = 10


def run(command: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Run a command as PID 1 does; return the container's exit code, and how the job ended.

    Raises LaunchError if the command cannot be started (exit code 126 or 127), and before the
    toolkit's `train` if the job's config files are unusable (2).
    """
    if is_train(command):
        # The toolkit would say so with a traceback, and end with 1.
        toolkit.read_config({**environ, toolkit.BASE_DIR_VARIABLE: toolkit.base_dir(environ)})
    with selectors.DefaultSelector() as ready, LauncherRegistry(ready, command[0]) as registry:
        return _Init(command, signals, ready, registry).run(environ)


# What is decided: from values to values, without effects.


class Receiver(enum.Enum):
    """Who gets a stop."""

    LAUNCHERS = "each launcher that runs"
    NOBODY = "nobody: `train` has some seconds to finish by itself"
    COMMAND = "the command"


def receiver(command: Sequence[str], *, running: bool, reported: bool, finishing: bool) -> Receiver:
    """Return who gets a stop.

    `running`: a launcher runs and has it already; `reported`: none runs, and the last one has
    reported how it ends; `finishing`: `train` has been given its time to finish already.
    """
    if running:
        return Receiver.LAUNCHERS
    if reported and is_train(command) and not finishing:
        return Receiver.NOBODY
    return Receiver.COMMAND


def signal_for(command: Sequence[str], stop_signal: int) -> int:
    """Return the signal with which a stop ends the command."""
    # The toolkit reports success after SIGINT, or just goes on (retrying.py, in its wait).
    return signal.SIGTERM if is_train(command) else stop_signal


def is_train(command: Sequence[str]) -> bool:
    """Tell whether a command is the toolkit's `train`."""
    # SageMaker's word comes last, behind what an image has in front of it.
    return os.path.basename(command[-1]) == _TRAIN


# What is done.


class _Init:
    def __init__(
        self,
        command: Sequence[str],
        signals: Signals,
        selector: selectors.BaseSelector,
        launchers: LauncherRegistry,
    ) -> None:
        self._command = command
        self._signals = signals
        self._selector = selector
        self._launchers = launchers
        self._process: subprocess.Popen[bytes]
        self._stop_signal = 0  # the first one
        self._finish_deadline: float | None = None  # `train`: the job has ended, and a stop came

    def run(self, environ: Mapping[str, str]) -> Result:
        """Start the command and wait until it and the launchers have ended."""
        output = os.path.join(toolkit.base_dir(environ), "output")
        failure_file = os.path.join(output, "failure")
        before = version_of(failure_file)
        hint = "; install sagemaker-training, or use the entry point `sm-launch` without `init`"
        self._process = start(
            self._command,
            {**environ, INIT: self._launchers.name},
            hint=hint if self._command[0] == _TRAIN else "",
        )
        self._selector.register(self._launchers, selectors.EVENT_READ, self._accept)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        while self._process.returncode is None or self._launchers.pids:
            timeout = self._finish_deadline and max(0.0, self._finish_deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            if self._finish_deadline and time.monotonic() >= self._finish_deadline:
                self._finish_deadline = None
                self._end_command()
        reported = self._launchers.reported
        if reported and reported.stop_signal and version_of(failure_file) != before:
            _remove_failure(failure_file, reported.exit_code)
        # The toolkit writes `success`, or `failure`. What it raises because it cannot write that is
        # lost, and it ends with 0 (trainer.py): SageMaker would take the job for completed.
        is_toolkit = is_train(self._command) and "SAGEMAKER_TRAINING_MODULE" in environ
        hides_failure = is_toolkit and not os.path.exists(os.path.join(output, "success"))
        code, stop = self._process.returncode, self._stop_signal
        return of_container(code, reported, stop, hides_failure=hides_failure)

    def _accept(self) -> None:
        command = self._process.pid if self._process.returncode is None else 0
        for pid in self._launchers.accept(command):
            if self._stop_signal:
                send(pid, self._stop_signal)  # the launcher has come too late to train

    def _on_signals(self) -> None:
        self._accept()  # a launcher that has just come counts; its command may be reaped next
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                reap(self._process)
            elif number in STOPS:
                self._stop(number)
            else:
                log(left_alone(number))

    def _stop(self, number: int) -> None:
        self._stop_signal = self._stop_signal or number
        sent = [send(pid, number) for pid in self._launchers.pids]
        to = receiver(
            self._command,
            running=any(sent),
            reported=self._launchers.reported is not None,
            finishing=self._finish_deadline is not None,
        )
        if to == Receiver.NOBODY:
            name, seconds = signal_name(number), _FINISH_SECONDS
            log(f"{name}: the job has ended; {_TRAIN} has {seconds} s to finish.")
            self._finish_deadline = time.monotonic() + _FINISH_SECONDS
        elif to == Receiver.COMMAND:
            self._end_command()

    def _end_command(self) -> None:
        if self._process.returncode is None:
            log(
                f"{signal_name(self._stop_signal)}: no launcher is running; stopping "
                f"{self._command[0]}."
            )
            send(self._process.pid, signal_for(self._command, self._stop_signal))


def _remove_failure(path: str, exit_code: int) -> None:
    """Remove the toolkit's failure file if it says no more than that a launcher ended so."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        # As its errors.py writes it. 1: by way of a shell script, `sm-launch ... || exit 1`.
        if re.match(rf"\w+:\nExitCode ({exit_code}|1)\n", file.read(4096)):
            os.remove(path)
