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

from launcher.errors import LaunchError
from launcher.host.processes import send, start_tied
from launcher.host.signals import Signals
from launcher.text.protocol import LineSocket, decoded, encoded

_POLL_SECONDS = 0.1  # between two checks for a stop
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
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    try:
        process = start_tied(argv, environ, **pipes)
    except LaunchError as error:
        return Answer("", "", str(error).rstrip("."))
    deadline = time.monotonic() + seconds
    problem, is_late = "", False
    while not problem and process.returncode is None:
        try:
            out, err = process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired as error:
            out, err = error.output or b"", error.stderr or b""
            is_late = time.monotonic() >= deadline
            if signals and signals.stop():
                problem = "it was interrupted by a stop"
            elif is_late:
                problem = f"it did not finish within {seconds:.0f} s"
    if problem:  # do not wait for its end: a driver's call may keep it alive
        with contextlib.suppress(OSError):  # it is another user's now (setuid)
            os.killpg(process.pid, signal.SIGKILL)
    elif process.returncode:
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        problem = f"it {how}"
    return Answer(out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), problem, is_late)


class Helper:
    """A process in a session of its own that exchanges lines of JSON with this one.

    Calls take(message) for each message. The last one says `why` there are no more: it has ended,
    or cannot be started; `name` is for people. Its last argument is its socket's descriptor.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        selector: selectors.BaseSelector,
        name: str,
        take: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._take, self._is_open = take, True
        self.pid, self._end = 0, f"{name} has ended"
        ours, theirs = socket.socketpair()
        with theirs:
            argv, fds = [*argv, str(theirs.fileno())], [theirs.fileno()]
            try:
                process = start_tied(argv, environ, folder=folder, pass_fds=fds)
                self.pid, process.returncode = process.pid, 0  # the loop reaps it, not Popen
            except LaunchError as error:
                self._end = f"{name} cannot be started: {str(error).rstrip('.')}"
        self._lines = LineSocket(ours, _REPLY_BYTES, selector, self._read)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless the helper has ended: its end is reported."""
        with contextlib.suppress(OSError):
            self._lines.send(encoded(message))

    def _read(self, lines: LineSocket) -> None:
        try:
            messages = [*map(decoded, lines.read())]
        except (EOFError, OSError, ValueError):
            messages = [{"why": self._end}]
        for message in messages:
            if self._is_open:
                self._take(message)

    def close(self) -> None:
        """Kill it; take() is not called any more."""
        if not self._is_open:
            return
        self._is_open = False
        self._lines.close()
        if self.pid:
            send(self.pid, signal.SIGKILL)
