"""Signals that a loop can wait for: handlers only record them, and the loop acts.

Handlers, because execve(2) resets them; ranks would inherit ignored signals.
"""

from __future__ import annotations

import contextlib
import os
import signal

from launcher.errors import OTHERS, STOPS
from launcher.text.log import log
from launcher.text.words import signal_name

_ALWAYS = (signal.SIGTERM, signal.SIGCHLD)


class Signals:
    """Records signals and ends of children from its creation on; a selector can wait for it.

    Python itself writes each signal's number to a pipe (signal module, set_wakeup_fd), and `take`
    reads it there. `stop` is the number of the first stop of this process, 0 if none has arrived.
    It belongs to the class, so that whatever may wait long can look at it (child.py).
    """

    stop = 0

    def __init__(self) -> None:
        self._logged: set[int] = set()  # of OTHERS
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*STOPS, signal.SIGCHLD, *OTHERS):
            # Signals that nohup and `&` ignore stay ignored. SIGTERM is handled in any case: a
            # program that keeps the toolkit alive through a stop makes its children ignore SIGTERM.
            # If SIGCHLD were ignored, the kernel would reap torchrun before we can.
            if number in _ALWAYS or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._arrived)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPS, signal.SIGCHLD))

    def _arrived(self, number: int, frame: object) -> None:
        if number in STOPS:
            Signals.stop = Signals.stop or number

    def ignore_stops(self) -> None:
        """Ignore stops and OTHERS from now on: they no longer change how this process ends."""
        for number in (*STOPS, *OTHERS):
            signal.signal(number, signal.SIG_IGN)

    def fileno(self) -> int:
        """Return the descriptor that a selector waits for."""
        return self._reader

    def take(self) -> bytes:
        """Return the numbers of the signals that arrived since the last call, one in each byte.

        Log the first of each of OTHERS, instead of returning it.
        """
        arrived = b""
        with contextlib.suppress(BlockingIOError):
            arrived = os.read(self._reader, 4096)
        for number in {*arrived} & {*OTHERS} - self._logged:
            self._logged.add(number)
            why = "it is not a stop signal, and is not forwarded to the ranks"
            log(f"{signal_name(number)}: ignored; {why}.")
        return bytes(number for number in arrived if number not in OTHERS)
