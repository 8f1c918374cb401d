"""PID 1 of a container: `sm-launch init COMMAND` runs a command and passes stops on.

SageMaker stops a job with SIGTERM to PID 1, and with SIGKILL 120 s later. Its toolkit's `train`
as PID 1 does not hear it. Behind an init such as tini it would die of it at once, and the
container with it, while ranks save. So this init knows whether a launcher runs somewhere below
the command: each tells it over a Unix socket (presence.py), and says at its end how it ended.

- A stop goes to the launchers that are there; where there is none, to the command.
- This process ends when the command and all launchers have ended, and reaps whatever the kernel
  gives PID 1 to reap.
- Its exit code is the command's; where that is 1, what the toolkit makes of every failure, it is
  the one that the last launcher said.
- A failure file that the toolkit wrote because a launcher was stopped is removed: it takes every
  exit code but 0 for a failure. A host that is stopped since another one was gets no signal here;
  its launcher says that it was stopped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence

from launcher.errors import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, LaunchError, log
from launcher.job import toolkit
from launcher.job.options import INIT
from launcher.presence import Ending, may_speak, understood
from launcher.signals import Signals, reap, signal_name

_TRAIN = "train"  # the toolkit's program, with which SageMaker starts every image
# Seconds that `train` has for its end, such as an upload, when a stop comes after the job's.
_TO_FINISH = 10
_BACKLOG = 128  # connections that wait to be taken in


def run(command: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Ending:
    """Run a command as PID 1 does; return the exit code for the container, and the job's end.

    Raises LaunchError where the command cannot be started (exit code 126 or 127), and before the
    toolkit's `train` where the config files of the job are of no use (2).
    """
    if _is_train(command):
        # The toolkit would say so with a traceback, and end with 1.
        toolkit.read_config({**environ, toolkit.BASE_DIR_VARIABLE: toolkit.base_dir(environ)})
    with _Init(command, signals, toolkit.base_dir(environ)) as init:
        return init.run(environ)


class _Init:
    def __init__(self, command: Sequence[str], signals: Signals, base_dir: str) -> None:
        self._command = command
        self._signals = signals
        self._failure = os.path.join(base_dir, "output", "failure")
        self._process: subprocess.Popen[bytes]
        self._returncode: int | None = None  # the command's
        self._launchers: dict[socket.socket, int] = {}  # connection and pid of each that is there
        self._said: Ending | None = None  # by the last launcher to end
        self._refused: set[int] = set()  # uids
        self._stop_signal = 0
        self._failed_before = os.path.exists(self._failure)
        self._deadline: float | None = None  # of `train`, when the job has ended and a stop came
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # the kernel finds a free abstract name: unix(7), autobind
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)

    def __enter__(self) -> _Init:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self._listener.close()

    def run(self, environ: Mapping[str, str]) -> Ending:
        """Start the command and wait until it and the launchers have ended."""
        name = self._listener.getsockname()[1:].decode()
        self._start({**environ, INIT: name})
        while self._returncode is None or self._launchers:
            timeout = self._deadline and max(0.0, self._deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            if self._deadline and time.monotonic() >= self._deadline:
                self._deadline = None
                self._end_command()
        code = self._returncode if self._returncode >= 0 else 128 - self._returncode
        said = self._said or Ending(0)
        if said.was_stopped:
            self._withdraw_failure(said.exit_code)
        # The toolkit makes 1 of every failure, and 0 of a Ctrl-C that it hears, too.
        if said.exit_code and (code == 1 or (code == 0 and self._stop_signal)):
            code = said.exit_code
        elif code == 128 + signal.SIGTERM and self._stop_signal:
            code = 128 + self._stop_signal  # see _end_command
        return Ending(code, said.was_stopped)

    def _start(self, environ: Mapping[str, str]) -> None:
        name = self._command[0]
        try:
            self._process = subprocess.Popen(self._command, env=environ)
        except FileNotFoundError:
            hint = "; install sagemaker-training, or use the entry point `sm-launch` without `init`"
            if shutil.which(name):
                hint = " in full: its first line names an interpreter that is not"
            elif name != _TRAIN:
                hint = ""
            raise LaunchError(f"{name} is not there{hint}.", exit_code=EXIT_NOT_FOUND) from None
        except OSError as error:
            raise LaunchError(
                f"cannot execute {name}: {error.strerror}.", exit_code=EXIT_CANNOT_EXECUTE
            ) from None

    # Launchers

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # no more have come, or there is no descriptor for one
            for _ in range(_BACKLOG + 1):  # all that have come by now; a flood of them has to wait
                connection, _ = self._listener.accept()
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid, uid, _gid = struct.unpack("i2I", credentials)  # unix(7), struct ucred
                if self._trusts(pid, uid):
                    self._welcome(connection, pid)
                else:
                    connection.close()

    def _trusts(self, pid: int, uid: int) -> bool:
        command = self._process.pid if self._returncode is None else 0
        if may_speak(pid, uid, command, self._launchers.values()):
            return True
        if uid not in self._refused:
            self._refused.add(uid)
            log(
                f"refused process {pid} of uid {uid}, which is no launcher of this job; expected "
                f"root, uid {os.geteuid()}, or the user of {self._command[0]}."
            )
        return False

    def _welcome(self, connection: socket.socket, pid: int) -> None:
        connection.setblocking(False)
        self._launchers[connection] = pid
        self._said = None  # by one before
        act = functools.partial(self._listen_to, connection)
        self._selector.register(connection, selectors.EVENT_READ, act)
        if self._stop_signal:
            _send(pid, self._stop_signal)  # it comes too late to train

    def _listen_to(self, connection: socket.socket) -> None:
        word = b""
        with contextlib.suppress(OSError):
            word = connection.recv(64)
        if word:
            self._said = understood(word) or self._said
            return
        self._selector.unregister(connection)
        connection.close()
        del self._launchers[connection]

    # Signals

    def _on_signals(self) -> None:
        self._accept()  # a launcher that has just come counts, and its command may be gone next
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self._stop(number)

    def _reap(self) -> None:
        """Take in ended children: the command, and the orphans that the kernel gave us."""
        ended, _ = reap()
        if self._process.pid in ended:
            self._returncode = self._process.returncode = ended[self._process.pid]

    def _stop(self, number: int) -> None:
        if not self._stop_signal:
            self._stop_signal = number
        told = [_send(pid, number) for pid in self._launchers.values()]
        if any(told):
            return
        if self._said and _is_train(self._command) and not self._deadline:
            log(f"{signal_name(number)}: the job has ended; {_TRAIN} has {_TO_FINISH} s to finish.")
            self._deadline = time.monotonic() + _TO_FINISH
        else:
            self._end_command()

    def _end_command(self) -> None:
        if self._returncode is None:
            log(f"{signal_name(self._stop_signal)}: no launcher runs; ending {self._command[0]}.")
            # Of SIGINT the toolkit makes a success, or just goes on (retrying.py, in its wait).
            term = _is_train(self._command)
            _send(self._process.pid, signal.SIGTERM if term else self._stop_signal)

    def _withdraw_failure(self, exit_code: int) -> None:
        """Remove the toolkit's account of a stop, in which it calls exit_code a failure's."""
        if self._failed_before:
            return
        with contextlib.suppress(OSError), open(self._failure, errors="replace") as file:
            # As its errors.py writes it. 1: by way of a shell script, `sm-launch ... || exit 1`.
            if re.match(rf"\w+:\nExitCode ({exit_code}|1)\n", file.read(4096)):
                os.remove(self._failure)


def _is_train(command: Sequence[str]) -> bool:
    # SageMaker's word comes last, behind what an image has in front of it.
    return os.path.basename(command[-1]) == _TRAIN


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except OSError:  # gone, or another user's
        return False
    return True
