"""Signals as something to wait for: the handlers note them, the loop in supervise.py acts."""

from __future__ import annotations

import os
import signal
import socket

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ALWAYS = (signal.SIGTERM, signal.SIGCHLD)


class Signals:
    """Notes stops and the ends of children from its making on; a selector can wait for it.

    The handlers do nothing: Python itself writes each signal's number to a socket (signal
    module, set_wakeup_fd), and `take` reads it there.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (*STOPS, signal.SIGCHLD)
            # nohup and `&` ignore theirs on purpose. SIGTERM is taken all the same: the way
            # to keep the toolkit alive through a stop leaves it ignored for its children.
            # SIGCHLD ignored would have the kernel reap torchrun in our place.
            if number in _ALWAYS or signal.getsignal(number) != signal.SIG_IGN
        }
        # A mask is inherited, too, by us and by the ranks.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers)

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def ignore_stops(self) -> None:
        """From now on until the process has ended, let no stop change how it ends."""
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
            self._handlers.pop(number, None)

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._reader.fileno()

    def take(self) -> bytes:
        """Return the numbers of the signals that came since the last call, one a byte."""
        try:
            return self._reader.recv(4096)
        except BlockingIOError:
            return b""


def reap() -> tuple[dict[int, int], bool]:
    """Take in ended children, adopted ones too.

    Returns their exit codes by pid, negative for a signal, and whether there are any left.
    """
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = os.waitstatus_to_exitcode(status)


def signal_name(number: int) -> str:
    """Return a signal's name and number, as in `SIGSEGV (signal 11)`."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
