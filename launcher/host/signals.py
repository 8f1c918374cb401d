"""Signals that a loop can wait for: handlers only record them, and the loop acts.

Handlers, because execve(2) resets them; ranks would inherit ignored signals.
"""

from __future__ import annotations

import contextlib
import signal
import socket

from launcher.errors import OTHERS, STOPS
from launcher.text.log import log
from launcher.text.words import signal_name

_ALWAYS = (signal.SIGTERM, signal.SIGCHLD)


class Signals:
    """Records signals and ends of children from its creation on; a selector can wait for it.

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
            for number in (*STOPS, signal.SIGCHLD, *OTHERS)
            # Signals that nohup and `&` ignore stay ignored. SIGTERM is handled in any case: a
            # program that keeps the toolkit alive through a stop makes its children ignore SIGTERM.
            # If SIGCHLD were ignored, the kernel would reap torchrun before we can.
            if number in _ALWAYS or signal.getsignal(number) != signal.SIG_IGN
        }
        # Children inherit the mask, too: this is our parent's, and the ranks would get ours.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPS, signal.SIGCHLD))
        self._seen = b""  # signals that `stop` has read and `take` has not returned yet
        self._logged: set[int] = set()  # of OTHERS

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
        """Ignore stops and OTHERS from now on: they no longer change how this process ends."""
        for number in (*STOPS, *OTHERS):
            signal.signal(number, signal.SIG_IGN)
            self._handlers.pop(number, None)

    def fileno(self) -> int:
        """Return the descriptor that a selector waits for."""
        return self._reader.fileno()

    def take(self) -> bytes:
        """Return the numbers of the signals that arrived since the last call, one in each byte.

        Log the first of each of OTHERS, instead of returning it.
        """
        seen, self._seen = self._seen, b""
        with contextlib.suppress(BlockingIOError):
            for number in self._reader.recv(4096):
                if number not in OTHERS:
                    seen += bytes([number])
                elif number not in self._logged:
                    self._logged.add(number)
                    why = "it is not a stop signal, and is not forwarded to the ranks"
                    log(f"{signal_name(number)}: ignored; {why}.")
        return seen

    def stop(self) -> int:
        """Return the number of the first stop that was not taken yet; 0 if there is none.

        Its bytes no longer wake the selector: call `take` before waiting for more.
        """
        self._seen = self.take()
        return next((number for number in self._seen if number in STOPS), 0)
