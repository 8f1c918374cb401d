"""In each rank: report crashes, and exceptions in other threads.

faulthandler writes where a process crashed into a pipe, which the keeper reads at the end. An
exception in another thread is reported at once: the main thread may end in any way after it.

Loaded by rank.py, in the script's process: it imports no module of ours, and its failures must not
harm the script.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import resource
import signal
import sys
import threading
import time
import types
import weakref
from typing import Any, Callable

_LAST, _FEW = 1024, 256  # descriptors that most processes may have; below few none is high
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_NAME = 100  # characters of a thread's name
_SELDOM = 1.0  # seconds, at least, between two reported exceptions of threads


def write_crashes(descriptor: int) -> None:
    """Have faulthandler write where this process crashes, unless it already writes elsewhere.

    If the script enables faulthandler later, the script's own file counts. Forks of the script must
    not write here, least of all to a descriptor that they have closed and opened again.
    Raises OSError.
    """
    if faulthandler.is_enabled():
        os.close(descriptor)
        return
    # A script may close all descriptors. Without this one, a crash leaves no place. Files that it
    # opens later get low numbers, so another file is unlikely to get a high one.
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    high = min(soft if soft != resource.RLIM_INFINITY else _LAST, _LAST) - 16
    if high < _FEW:
        os.close(descriptor)
        return
    # Only faulthandler holds this object, until the script gives it another.
    file = io.FileIO(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, high), "w", closefd=False)
    os.close(descriptor)
    # Only of the crashing thread: other threads keep running. From Python 3.14 on faulthandler
    # would also call C's backtrace(), which may wait for ever for malloc's lock.
    options: dict[str, Any] = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    faulthandler.enable(file, all_threads=False, **options)
    is_ours = weakref.ref(file)

    def disable() -> None:
        if is_ours() is None:
            return
        handlers = {number: signal.getsignal(number) for number in _CRASHES}
        faulthandler.disable()  # it restores the previous handlers
        for number, handler in handlers.items():
            if handler is not None and handler is not signal.SIG_DFL:
                signal.signal(number, handler)

    os.register_at_fork(after_in_child=disable)


def report_threads(send: Callable[[dict[str, Any]], None], describe: types.ModuleType) -> None:
    """Report exceptions of other threads, and still show them as before.

    A hook that the script sets later replaces this one, unless it calls it: then the script decides
    about exceptions.
    """
    hook = threading.excepthook
    reported_at = -_SELDOM

    def show(args: threading.ExceptHookArgs) -> None:
        nonlocal reported_at
        with contextlib.suppress(BaseException):  # names and texts of the script may raise
            now = time.monotonic()
            # Threads may use SystemExit to end.
            if now - reported_at >= _SELDOM and not issubclass(args.exc_type, SystemExit):
                reported_at = now
                name = str(args.thread.name)[:_NAME] if args.thread else ""
                send({"thread": name, **describe.end(args.exc_value)})
        hook(args)

    threading.excepthook = show


def begin(crash: int, send: Callable[[dict[str, Any]], None], describe: types.ModuleType) -> None:
    """Watch for crashes and threads' exceptions, if possible; `crash` is the keeper's pipe."""
    with contextlib.suppress(Exception):
        write_crashes(crash)
    with contextlib.suppress(Exception):
        report_threads(send, describe)
