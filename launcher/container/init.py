"""PID 1 of a container: `sm-launch init COMMAND` runs a command and forwards stops.

SageMaker stops a job with SIGTERM to PID 1, and with SIGKILL 120 s later. Its toolkit's `train`
ignores SIGTERM as PID 1. Below an init such as tini, `train` would die of SIGTERM at once, and the
container would end while ranks save. So this init knows whether a launcher runs below the command:
each launcher connects to its Unix socket (presence.py) and reports how it ends.

- A stop goes to the running launchers; if none runs, to the command.
- This process ends when the command and all launchers have ended. It reaps the orphans that the
  kernel gives to PID 1.
- `of_container` (result/causes.py) chooses its exit code: the command's, or the last launcher's,
  since the toolkit turns every failure into 1, and `| tee` into 0.
- If a command fails and no launcher has written why, this init writes the reason. If the command
  never started a launcher, this init also tells the first host, which would wait for this one.
- The toolkit takes every exit code but 0 for a failure. If it wrote a failure file because a
  launcher was stopped, this init removes the file. A host that stops because another host was
  stopped gets no signal here; its launcher reports the stop.

launcher/__init__.py has the way of a stop from here to each rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from launcher.container.presence import NO_JOB
from launcher.errors import LaunchError
from launcher.host.cgroups import oom_kills, risen
from launcher.host.processes import reap, send, start
from launcher.host.signals import Signals
from launcher.host.system import System
from launcher.job import toolkit
from launcher.job.options import INIT, KEEP_EXIT_CODE
from launcher.job.prepare import prepare
from launcher.result.causes import SUCCESS, Result, of_container
from launcher.result.failure import version_of
from launcher.run import supervisor
from launcher.text.log import log
from launcher.text.protocol import LineSocket, Lobby
from launcher.text.words import shortened, signal_name

_TRAIN = toolkit.START_WORD  # the name of the toolkit's program, too
# Launchers that may still start after a stop, which ends each at once: those of a script's other
# steps, not of a loop until one succeeds.
_MOST_LATE = 20
_COMMAND = 200  # characters of a command in a message
# A launcher whose rank was killed reports the same code, but no text.
_KILLED = Result(128 + signal.SIGKILL, "its launcher was killed")
_RESULT = re.compile(rb"(\d{1,3}) (\d{1,2})")

# How messages describe the end of a last launcher that has written no reason.
_WITHOUT_REASON: Mapping[Result | None, str] = {
    None: "and never started a launcher",
    SUCCESS: "after its launcher had succeeded",
    _KILLED: f"and {_KILLED.text}",
}


def run(command: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Run a command as PID 1 does; return the container's exit code, and how the job ended.

    Raises LaunchError if the command cannot be started (exit code 126 or 127); if the job's config
    files are unusable, before the toolkit's `train` starts (2); and, with the command's exit code,
    if the command fails and no launcher has written why.
    """
    if is_train(command):
        # The toolkit would report this with a traceback, and end with 1.
        toolkit.read_config({**environ, toolkit.BASE_DIR_VARIABLE: toolkit.base_dir(environ)})
    init = _Init(command, signals)
    try:
        return init.run(environ)
    except LaunchError as error:
        if init.reported is None:
            _tell_first_host(error, environ, signals)
        raise


def is_train(command: Sequence[str]) -> bool:
    """Tell whether a command is the toolkit's `train`."""
    # SageMaker adds its word at the end, after an image's own words.
    return os.path.basename(command[-1]) == _TRAIN


class _Launcher(LineSocket):
    limit = 64  # bytes
    pid = 0  # until it has sent the token


class _Init(Lobby[_Launcher]):
    """The launchers of a container, and the command that starts them.

    `reported` is the result of the last launcher to end, None if none has ended.
    """

    def __init__(self, command: Sequence[str], signals: Signals) -> None:
        self._command, self._signals = command, signals
        self.reported: Result | None = None
        self._process: subprocess.Popen[bytes]
        self._stop_signal = 0  # the first one
        self._late = 0  # launchers that have started after it
        self._is_finishing = False  # `train`, though a stop came after the job's end
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("")  # the kernel finds a free abstract name: unix(7), autobind
        listener.listen()
        self._name, self._token = listener.getsockname()[1:].decode(), os.urandom(16).hex()
        selector = selectors.DefaultSelector()
        super().__init__(selector, _Launcher, self._take, lambda this, _: self._take(this, b""))
        self.listen(listener)

    def run(self, environ: Mapping[str, str]) -> Result:
        """Start the command and wait until it and the launchers have ended."""
        output = os.path.join(toolkit.base_dir(environ), "output")
        failure_file = os.path.join(output, "failure")
        before, kills = version_of(failure_file), oom_kills()
        hint = "; install sagemaker-training, or use the entry point `sm-launch` without `init`"
        self._process = start(
            self._command,
            {**environ, INIT: f"{self._name}:{self._token}"},
            hint=hint if self._command[0] == _TRAIN else "",
        )
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        while self._process.returncode is None or self._pids():
            for key, _ in self._selector.select():
                key.data()
        reported = self.reported
        if reported and reported.stop_signal and version_of(failure_file) != before:
            _remove_failure(failure_file, reported.exit_code)
        # The toolkit writes `success` or `failure`. If it cannot write, it loses that exception and
        # ends with 0 (trainer.py): SageMaker would take the job for completed.
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
            raise LaunchError(self._reason(reported, oom), result.exit_code)
        if result.exit_code and self._process.returncode == 0 and not is_stop:
            log(
                f"{self._command[0]} ended with 0, but its last launcher with {result.exit_code}: "
                f"this container ends with {result.exit_code} (with 0 if {KEEP_EXIT_CODE} is 1)."
            )
        return result

    def _pids(self) -> list[int]:
        """Return the pids of the running launchers."""
        return [each.pid for each in self.connections if each.pid]

    def _take(self, connection: _Launcher, line: bytes) -> None:
        """Handle a launcher's line; the last one, of a connection that has ended, is empty."""
        if connection.pid:
            if found := _RESULT.fullmatch(line):
                self.reported = Result(int(found[1]), stop_signal=int(found[2]))
            elif line != NO_JOB:
                self.reported = _KILLED
        elif line == self._token.encode():
            # The first number of struct ucred (unix(7)) is the pid, 0 for another container's.
            pid = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED)
            if pid:
                connection.pid, connection.is_stranger = pid, False
                self._joined(pid)
                return
        connection.close()

    def _joined(self, pid: int) -> None:
        if self._stop_signal:
            send(pid, self._stop_signal)  # this launcher started after the stop
            self._late += 1
            if self._late == _MOST_LATE:
                self._end_command("launchers start again and again")

    def _on_signals(self) -> None:
        self.accept()  # include a launcher that has just connected
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                reap(self._process)
            else:
                self._stop(number)

    def _stop(self, number: int) -> None:
        """Forward a stop to the launchers or, if none runs, to the command.

        `train` may finish after the job's end, with an upload, say; the second stop ends it.
        """
        self._stop_signal = self._stop_signal or number
        sent = [send(pid, number) for pid in self._pids()]
        if any(sent):
            return
        if self.reported and is_train(self._command) and not self._is_finishing:
            self._is_finishing = True
            log(f"{signal_name(number)}: the job has ended; {_TRAIN} may finish.")
        else:
            self._end_command()

    def _end_command(self, why: str = "no launcher is running") -> None:
        if self._process.returncode is None:
            number = self._stop_signal
            log(f"{signal_name(number)}: {why}; stopping {self._command[0]}.")
            # After SIGINT the toolkit reports success, or continues (retrying.py, in its wait).
            send(self._process.pid, signal.SIGTERM if is_train(self._command) else number)

    def _reason(self, reported: Result | None, oom: str) -> str:
        """Return why the container fails, if no launcher knows."""
        code = self._process.returncode
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        command = shortened(" ".join(self._command), _COMMAND)
        why = f"`{command}` {how} {_WITHOUT_REASON[reported]}"
        return f"{why}; {oom and f'{oom}; '}see this host's log"


def _tell_first_host(error: LaunchError, environ: Mapping[str, str], signals: Signals) -> None:
    """Report to the first host, if this is another, that this host cannot start.

    It gives up after a few seconds (_UNHEARD_SECONDS of peers/link.py): the first host may have no
    launcher either.
    """
    seen = {**environ, "SM_NUM_GPUS": "0", "SM_NUM_NEURONS": "0"}  # do not query the drivers
    # A script must be named; a hyperparameter may name it, and set options, too.
    for words in (["--train-script", _TRAIN], []):
        with contextlib.suppress(LaunchError):
            job = prepare(words, seen)
            if job and not job.coordinates:
                supervisor.run(job._replace(error=error), environ, System(signals))
            return


def _remove_failure(path: str, exit_code: int) -> None:
    """Remove the toolkit's failure file if it only gives a launcher's exit code."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        # In the form of its errors.py. 1: from a shell script, `sm-launch ... || exit 1`.
        if re.match(rf"\w+:\nExitCode ({exit_code}|1)\n", file.read(4096)):
            os.remove(path)
