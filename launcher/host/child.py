"""A command that is asked something, or a process that is talked to. Both may block for ever."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from launcher.host.processes import tie_to_this_process
from launcher.host.signals import Signals
from launcher.text.protocol import Lines, decoded, encoded

_KILL_SECONDS = 1  # that a killed command has to end
_POLL_SECONDS = 0.1  # of stops
_SEND_SECONDS = 5.0  # for a helper to take a message, of which the kernel holds 200 KB by itself
_REPLY_BYTES = 1 << 22  # of a line of a helper's, at most


class Answer(NamedTuple):
    """What a command said. `problem`: why it did not end with 0, "" if it did."""

    out: str
    err: str
    problem: str
    was_started: bool = True
    is_late: bool = False
    was_stopped: bool = False


class Child:
    """A command in a process group of its own, started at once."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._path = argv[0]
        self._process: subprocess.Popen[bytes] | None = None
        self._error = ""
        try:
            self._process = _started(argv, environ)
        except (OSError, subprocess.SubprocessError) as error:
            self._error = getattr(error, "strerror", None) or str(error)

    def answer(self, seconds: float, signals: Signals | None = None) -> Answer:
        """Return what it says within `seconds`; kill it if it has not ended by then.

        Or if a stop is among the signals, which stays there.
        """
        if self._process is None:
            problem = f"{self._path} cannot be started ({self._error})"
            return Answer("", "", problem, was_started=False)
        deadline = time.monotonic() + seconds
        while True:
            try:
                timeout = deadline - time.monotonic()
                timeout = min(timeout, _POLL_SECONDS) if signals else timeout
                out, err = self._process.communicate(timeout=timeout)
                break
            except subprocess.TimeoutExpired as error:
                if signals and signals.stop():
                    self.kill()
                    return Answer("", "", "it was interrupted by a stop", was_stopped=True)
                if time.monotonic() >= deadline:
                    self.kill()
                    late = f"it did not finish within {seconds:.0f} s"
                    return Answer(_text(error.output), _text(error.stderr), late, is_late=True)
        code, problem = self._process.returncode, ""
        if code:
            problem = f"it ended with exit code {code}"
        if code < 0:
            problem = f"it was killed by signal {-code}"
        return Answer(_text(out), _text(err), problem)

    def kill(self) -> None:
        """Kill it and what it started. A driver's call may keep it from dying: nobody waits."""
        process = self._process
        if process and process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)


def start_connected(
    argv: Sequence[str], environ: Mapping[str, str], **options: Any
) -> tuple[socket.socket, int]:
    """Start a process in a session of its own; return our end of a socket to it, and its pid.

    Its last argument is the other end's descriptor. The options are Popen's. Raises OSError, or
    SubprocessError.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            number = theirs.fileno()
            words = [*argv, str(number)]
            options |= {"env": dict(environ), "start_new_session": True, "pass_fds": [number]}
            process = subprocess.Popen(words, **options)
    except BaseException:
        ours.close()
        raise
    process.returncode = 0  # Popen is not to wait for it: the loop reaps all children
    return ours, process.pid


class Helper:
    """A process in a session of its own that is talked to in lines of JSON.

    take(message) is called for each that it sends, take(None) if it is gone. Its last argument is
    its socket's descriptor. Raises OSError, or SubprocessError, if it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        selector: selectors.BaseSelector,
        take: Callable[[Mapping[str, Any] | None], None],
    ) -> None:
        self._selector, self._take = selector, take
        self._lines, self._is_open = Lines(_REPLY_BYTES), True
        self._connection, self.pid = start_connected(argv, environ, cwd=folder or None)
        self._connection.settimeout(_SEND_SECONDS)
        selector.register(self._connection, selectors.EVENT_READ, self._read)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message; return whether it has been taken."""
        try:
            self._connection.sendall(encoded(message))
        except OSError:
            return False
        return True

    def _read(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
            messages = [*map(decoded, self._lines.feed(data))]
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            self._take(message)
        if not data and self._is_open:
            self._take(None)

    def close(self) -> None:
        """Kill it, and have take() not be called any more."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(KeyError):  # the loop waits for nothing any more
            self._selector.unregister(self._connection)
        self._connection.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


def _started(argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, which the kernel ends if we are killed."""
    return subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=tie_to_this_process(),
    )


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")
