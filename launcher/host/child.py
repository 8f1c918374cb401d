"""Run a command for its output, or talk to a helper process. Either may block for ever."""

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

_KILL_SECONDS = 1  # for a killed command to end
_POLL_SECONDS = 0.1  # between two checks for a stop
_SEND_SECONDS = 5.0  # for a helper to read a message; the kernel buffers 200 KB
_REPLY_BYTES = 1 << 22  # of a helper's longest line


class Answer(NamedTuple):
    """A command's output. `problem` says why it did not end with 0, "" if it did."""

    out: str
    err: str
    problem: str
    is_late: bool = False


def ask(
    argv: Sequence[str], environ: Mapping[str, str], seconds: float, signals: Signals | None = None
) -> Answer:
    """Run a command in a session of its own; return its output.

    Kill it after `seconds`, or if a stop is among the signals; the stop is not taken from them.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=tie_to_this_process(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "strerror", None) or error
        return Answer("", "", f"{argv[0]} cannot be started ({why})")
    deadline = time.monotonic() + seconds
    problem, is_late = "", False
    while not problem:
        try:
            out, err = process.communicate(timeout=_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired as error:
            out, err = error.output or b"", error.stderr or b""
            is_late = time.monotonic() >= deadline
            if signals and signals.stop():
                problem = "it was interrupted by a stop"
            elif is_late:
                problem = f"it did not finish within {seconds:.0f} s"
    else:
        _kill(process)
    if not problem and process.returncode:
        problem = f"it ended with exit code {process.returncode}"
        if process.returncode < 0:
            problem = f"it was killed by signal {-process.returncode}"
    return Answer(out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), problem, is_late)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and what it started. Do not wait: a driver's call may keep it alive."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)


class Helper:
    """A process in a session of its own that exchanges lines of JSON with this one.

    Calls take(message) for each message, and take(None) when it has ended. Its last argument is
    its socket's descriptor. Raises OSError or SubprocessError if it cannot be started.
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
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(_SEND_SECONDS)
        with theirs:
            process = subprocess.Popen(
                [*argv, str(theirs.fileno())],
                env=dict(environ),
                cwd=folder or None,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self.pid, process.returncode = process.pid, 0  # the loop reaps all children, not Popen
        selector.register(self._connection, selectors.EVENT_READ, self._read)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless the helper has ended: its end is reported."""
        with contextlib.suppress(OSError):
            self._connection.sendall(encoded(message))

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
        """Kill it; take() is not called any more."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(KeyError):  # the selector is closed
            self._selector.unregister(self._connection)
        self._connection.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
