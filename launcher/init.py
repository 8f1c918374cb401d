"""PID 1 of a container: `sm-launch init COMMAND` runs a command and passes stops on.

SageMaker stops a job with SIGTERM to PID 1, and with SIGKILL 120 s later. Its toolkit's `train`
as PID 1 does not hear it. Behind an init such as tini it would die of it at once, and the
container with it, while ranks save. So this init knows whether a launcher runs somewhere below
the command: every launcher connects to the Unix socket that LAUNCHER_INIT names as soon as it
can take a stop, stays connected until it ends, and says its exit code at the end.

- A stop goes to the launchers that are there; where there is none, to the command.
- This process ends when the command and all launchers have ended, and reaps whatever the kernel
  gives PID 1 to reap.
- Its exit code is the command's; where that is 1, what the toolkit makes of every failure, it is
  the one that the last launcher said.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence

from launcher import toolkit
from launcher.errors import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, LaunchError, log
from launcher.options import INIT
from launcher.signals import Signals, reap, signal_name

_TRAIN = "train"  # the toolkit's program, with which SageMaker starts every image
# Seconds that `train` has for its end, such as an upload, when a stop comes after the job's.
_TO_FINISH = 10


class Presence:
    """A launcher's word to the init above it: here from the start of the block to its end."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        if environ.get(INIT):
            # Where nobody listens, the variable has outlived its init.
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect("\0" + environ[INIT])

    def __enter__(self) -> Presence:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket:
            self._socket.close()

    def ends(self, exit_code: int) -> None:
        """Say the exit code that this launcher is about to end with."""
        if self._socket:
            with contextlib.suppress(OSError):
                self._socket.sendall(str(exit_code).encode())


def run(command: Sequence[str], environ: Mapping[str, str], signals: Signals) -> int:
    """Run a command as PID 1 does; return the exit code for the container.

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
        self._last_word: int | None = None  # exit code of the last launcher to end
        self._stop_signal = 0
        self._failed_before_stop = False
        self._deadline: float | None = None  # of `train`, when the job has ended and a stop came
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # the kernel finds a free abstract name: unix(7), autobind
        self._listener.setblocking(False)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)

    def __enter__(self) -> _Init:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self._listener.close()

    def run(self, environ: Mapping[str, str]) -> int:
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
        if self._stop_signal:
            self._withdraw_failure()
        code = self._returncode if self._returncode >= 0 else 128 - self._returncode
        # The toolkit makes 1 of every failure, and 0 of a Ctrl-C that it hears, too.
        told = code == 1 or (code == 0 and self._stop_signal)
        return self._last_word if told and self._last_word else code

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
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid, _uid, _gid = struct.unpack("3i", credentials)  # unix(7), struct ucred
                if pid == 0:  # of another container that has the same network
                    connection.close()
                    continue
                connection.setblocking(False)
                self._launchers[connection] = pid
                self._last_word = None  # of one before
                self._selector.register(
                    connection, selectors.EVENT_READ, functools.partial(self._listen_to, connection)
                )
                if self._stop_signal:
                    _send(pid, self._stop_signal)  # it comes too late to train

    def _listen_to(self, connection: socket.socket) -> None:
        word = b""
        with contextlib.suppress(OSError):
            word = connection.recv(16)
        if word:
            with contextlib.suppress(ValueError):
                self._last_word = int(word)
            return
        self._selector.unregister(connection)
        connection.close()
        del self._launchers[connection]

    # Signals

    def _on_signals(self) -> None:
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
        self._accept()  # one that has just come counts
        if not self._stop_signal:
            self._stop_signal = number
            self._failed_before_stop = os.path.exists(self._failure)
        if self._launchers:
            for pid in self._launchers.values():
                _send(pid, number)
        elif self._last_word is not None and _is_train(self._command) and not self._deadline:
            log(f"{signal_name(number)}: the job has ended; {_TRAIN} has {_TO_FINISH} s to finish.")
            self._deadline = time.monotonic() + _TO_FINISH
        else:
            self._end_command()

    def _end_command(self) -> None:
        if self._returncode is None:
            log(f"{signal_name(self._stop_signal)}: no launcher runs; ending {self._command[0]}.")
            _send(self._process.pid, self._stop_signal)

    def _withdraw_failure(self) -> None:
        """Remove the failure file that the toolkit wrote because a launcher was stopped.

        It takes every exit code but 0 for a failure. A stopped job has none to explain.
        """
        if self._failed_before_stop or self._last_word != 128 + self._stop_signal:
            return
        with contextlib.suppress(OSError), open(self._failure, errors="replace") as file:
            if f"ExitCode {self._last_word}" in file.read(4096):
                os.remove(self._failure)


def _is_train(command: Sequence[str]) -> bool:
    # SageMaker's word comes last, behind what an image has in front of it.
    return os.path.basename(command[-1]) == _TRAIN


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):  # gone, or another user's
        os.kill(pid, number)
