"""In each rank: what ends it, or goes wrong in it, without its main thread raising anything.

A crash writes where it was into a file in memory that the keeper reads after it. What another
thread raised is reported at once, as the main thread may end in any way after that.

Loaded by rank.py, in the script's process: it imports nothing of ours, and whatever fails here must
not be the script's loss.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import fcntl
import os
import resource
import signal
import sys
import threading
import time
import types
import weakref
from typing import Any, Callable

_LAST, _FEW = 1024, 256  # descriptors: most processes may have as many; below few none is high
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_NAME = 100  # characters of a thread's name
_SELDOM = 1.0  # s from one thread's exception that is reported to the next


class File:
    """Where faulthandler writes, which alone holds this object, for as long as it does."""

    def __init__(self, descriptor: int) -> None:
        try:
            # A script may close all descriptors. If it has closed this one, a crash leaves no
            # place. Files that it opens later get low numbers, so a high number is unlikely to
            # become another file's.
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            soft = _LAST if soft == resource.RLIM_INFINITY else min(soft, _LAST)
            if soft < _FEW:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, soft - 16)
            self.status = os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def flush(self) -> None:
        """Do nothing; faulthandler asks for it."""

    def close(self) -> None:
        """Close the descriptor, if it is still this file's."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), self.status):
                os.close(self._descriptor)


def write_crashes(descriptor: int) -> None:
    """Have faulthandler write where this process crashes, unless it writes elsewhere.

    If the script enables it for itself, that counts from then on. What the script forks has its own
    crashes: it must not write here, least of all to a descriptor that it has closed and opened.
    Raises OSError.
    """
    if faulthandler.is_enabled():
        os.close(descriptor)
        return
    file = File(descriptor)
    # Of the thread alone that crashes: others run on meanwhile. From Python 3.14 on it would also
    # call C's backtrace(), which may wait for ever for a lock of malloc's.
    options: dict[str, Any] = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    faulthandler.enable(file, all_threads=False, **options)
    is_ours = weakref.ref(file)

    def disable() -> None:
        file = is_ours()
        if file is None:
            return
        handlers = {number: signal.getsignal(number) for number in _CRASHES}
        faulthandler.disable()  # which has them be what they were at its begin
        for number, handler in handlers.items():
            if handler is not None and handler is not signal.SIG_DFL:
                signal.signal(number, handler)
        file.close()

    os.register_at_fork(after_in_child=disable)


def report_threads(
    send: Callable[[dict[str, Any]], None], describe: types.ModuleType, rank: str
) -> None:
    """Report what other threads raise, and have it shown as before.

    A hook that the script sets after this comes in its place, unless it calls the one before it:
    then the script decides what an exception means.
    """
    hook = threading.excepthook
    reported_at = -_SELDOM

    def show(args: threading.ExceptHookArgs) -> None:
        nonlocal reported_at
        with contextlib.suppress(BaseException):  # whatever the script's own names and texts raise
            now = time.monotonic()
            # Threads may use SystemExit to end.
            if now - reported_at >= _SELDOM and not issubclass(args.exc_type, SystemExit):
                reported_at = now
                name = str(args.thread.name)[:_NAME] if args.thread else ""
                send({"thread": name, **describe.end(args.exc_value, rank)})
        hook(args)

    threading.excepthook = show


def begin(
    crash: int, send: Callable[[dict[str, Any]], None], describe: types.ModuleType, rank: str
) -> None:
    """Watch for both; `crash` is the keeper's file, `rank` the path of rank.py.

    What cannot be done is not.
    """
    with contextlib.suppress(Exception):
        write_crashes(crash)
    with contextlib.suppress(Exception):
        report_threads(send, describe, rank)
