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
from launcher.host.processes import send, start, start_tied, tie_to_this_process
from launcher.host.signals import Signals
from launcher.text.protocol import LineSocket, decoded

_POLL_SECONDS = 0.1  # between two checks for a stop


class Answer(NamedTuple):
    """A command's output. `problem` says why it did not end with 0, "" if it did."""

    out: str
    err: str
    problem: str
    is_late: bool = False


def ask(argv: Sequence[str], environ: Mapping[str, str], seconds: float) -> Answer:
    """Run a command in a session of its own; return its output.

    Kill it after `seconds`, or if a stop arrives.
    """
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    pipes |= {"stdin": subprocess.DEVNULL, "preexec_fn": tie_to_this_process()}
    try:
        process = start(argv, environ, start_new_session=True, **pipes)
    except LaunchError as error:
        return Answer("", "", str(error).rstrip("."))
    out = err = b""
    problem, deadline = "", time.monotonic() + seconds
    while process.returncode is None and not Signals.stop and time.monotonic() < deadline:
        process.poll()  # communicate() waits for the end of its output: a daemon may hold it
        try:
            out, err = process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired as error:
            out, err = error.output or b"", error.stderr or b""
    code = process.returncode
    if code is None:  # do not wait for its end: a driver's call may keep it alive
        problem = f"it did not finish within {seconds:.0f} s"
        with contextlib.suppress(OSError):  # it is another user's now (setuid)
            os.killpg(process.pid, signal.SIGKILL)
    elif code:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        problem = f"it {how}"
    texts = [data.decode("utf-8", "replace") for data in (out, err)]
    return Answer(texts[0], texts[1], problem, is_late=code is None)


class Helper(LineSocket):
    """A process in a session of its own that exchanges lines of JSON with this one.

    Calls receive(message) for each message. The last one says `why` there are no more: it has
    ended, or cannot be started; `name` is for people. Its last argument is its socket's descriptor.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        selector: selectors.BaseSelector,
        name: str,
        receive: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.pid, why = 0, f"{name} has ended"
        ours, theirs = socket.socketpair()
        with theirs:
            argv, fds = [*argv, str(theirs.fileno())], [theirs.fileno()]
            try:
                self.pid = start_tied(argv, environ, folder=folder, pass_fds=fds)
            except LaunchError as error:
                why = f"{name} cannot be started: {str(error).rstrip('.')}"

        def take(_: LineSocket, line: bytes) -> None:
            message: Mapping[str, Any] = {}
            with contextlib.suppress(ValueError):  # at the end there is none
                message = decoded(line)
            receive(message or {"why": why})

        super().__init__(ours, selector, take, lambda this, _: take(this, b""))

    def close(self) -> None:
        """Kill it; there are no more messages."""
        if self.is_open:
            super().close()
            if self.pid:
                send(self.pid, signal.SIGKILL)
