"""Runs the user's script in a rank's process, and reports how it ended.

Executed by the rank's keeper: `python rank.py script PATH ARGUMENT ...` or `python rank.py module
NAME ARGUMENT ...`; or imported by warm.py. The script must not notice: its `__main__`, `sys.argv`,
`sys.path[0]`, exit code, traceback and child processes are those of `python PATH ARGUMENT ...`.
From outside, nobody can tell which exception ended a rank, and when; nor where it crashed, nor what
its threads raised.

Its messages to the launcher, which the keeper passes on to keepers.py (`_said`):

    script_ended: alone               when the script has ended by itself
    end, groups                       why it failed (describe.py), and its process groups
    thread: its name, and its end     an exception in a thread
    watch: a signal; poll: a number   that it can be polled, and each reply (watch/in_rank.py)
    no JSON                           what faulthandler has written, at a crash or that signal
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import fcntl
import importlib.machinery
import importlib.util
import io
import os
import resource
import signal
import sys
import threading
import types
import weakref

# Bound before the script runs, which may replace it (gevent).
from _thread import allocate_lock
from collections.abc import Iterator
from json import dumps, loads
from socket import SO_SNDTIMEO, SOL_SOCKET, socket
from struct import pack
from time import monotonic
from typing import Any, Callable

_SEND_SECONDS = 1  # for the keeper to take a message
_HIGHEST, _FEW = 1008, 256  # of descriptors; with a limit below _FEW it stays where it is
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_NAME = 100  # characters of a thread's name
_SELDOM = 1.0  # seconds, at least, between two reported exceptions of threads


def load(path: str) -> types.ModuleType:
    """Load a file of the launcher, invisibly for the script."""
    module = types.ModuleType(os.path.basename(path)[:-3])
    module.__file__ = path
    importlib.machinery.SourceFileLoader(module.__name__, path).exec_module(module)
    return module


describe = load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "describe.py"))


class KeeperConnection:
    """The process's end of the socket to its keeper.

    It must never harm the script: messages that cannot be sent are dropped. To make one may raise
    OSError.
    """

    def __init__(self, descriptor: int) -> None:
        self._pid = os.getpid()
        self._is_sending = allocate_lock()  # threads may raise at any time
        self._socket = socket(fileno=_out_of_the_way(descriptor))
        self._socket.set_inheritable(False)
        # Only for sends: a thread waits here for requests.
        self._socket.setsockopt(SOL_SOCKET, SO_SNDTIMEO, pack("ll", _SEND_SECONDS, 0))
        self._status = os.fstat(self._socket.fileno())
        os.register_at_fork(after_in_child=self.close)

    def _is_ours(self) -> bool:
        """Tell whether the descriptor is still this socket: a script may close all descriptors."""
        return os.path.samestat(os.fstat(self._socket.fileno()), self._status)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, but not from a fork of the script that returned here."""
        try:
            if os.getpid() == self._pid and self._is_ours():
                text = dumps(message, ensure_ascii=False) + "\n"
                data = text.encode("utf-8", "surrogatepass")  # as json does
                with self._is_sending:
                    self._socket.sendall(data)
        except OSError:  # the keeper is gone or suspended; it ignores half a message
            self.close()

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the launcher's requests, until the connection ends."""
        rest = b""
        while self._is_ours() and (data := self._socket.recv(4096)):
            *lines, rest = (rest + data).split(b"\n")
            yield from map(loads, lines)

    def fileno(self) -> int:
        """Return the connection's descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection, in forks of the script, too."""
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._socket.close()


def _out_of_the_way(descriptor: int) -> int:
    """Give a descriptor a high number, if there may be one.

    A script may close all low ones; and files that it opens later are unlikely to get a high one.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    high = _HIGHEST if soft == resource.RLIM_INFINITY else min(soft - 16, _HIGHEST)
    if high < _FEW:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, high)
    os.close(descriptor)
    return moved


def report_crashes(descriptor: int) -> None:
    """Have faulthandler write where this process crashes, unless it already writes elsewhere.

    If the script enables faulthandler later, the script's own file counts. Forks of the script must
    not write here, least of all to a descriptor that they have closed and opened again.
    """
    if faulthandler.is_enabled() or descriptor < _FEW:
        return
    # Only faulthandler holds this object, until the script gives it another.
    file = io.FileIO(descriptor, "w", closefd=False)
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


def report_threads(keeper: KeeperConnection) -> None:
    """Report exceptions of other threads at once, and still show them as before.

    The main thread may end in any way after them. A hook that the script sets later replaces this
    one, unless it calls it: then the script decides about exceptions.
    """
    hook = threading.excepthook
    reported_at = -_SELDOM

    def show(args: threading.ExceptHookArgs) -> None:
        nonlocal reported_at
        with contextlib.suppress(BaseException):  # names and texts of the script may raise
            # Threads may use SystemExit to end.
            is_due = monotonic() - reported_at >= _SELDOM
            if is_due and not issubclass(args.exc_type, SystemExit):
                reported_at = monotonic()
                name = str(args.thread.name)[:_NAME] if args.thread else ""
                keeper.send({"thread": {"name": name, "end": describe.end(args.exc_value)}})
        hook(args)

    threading.excepthook = show


def connect() -> Callable[[BaseException | None], None]:
    """Connect to the keeper, where there is one.

    Returns the function to call when the script has ended, with the exception that has ended it.
    """
    watcher = os.environ.pop("LAUNCHER_WATCHER", None)
    try:
        keeper = KeeperConnection(int(os.environ.pop("LAUNCHER_KEEPER")))
    except (KeyError, OSError):  # there is none; PYTHON_EXEC's program has closed it
        return lambda error: None
    with contextlib.suppress(Exception):
        report_crashes(keeper.fileno())
    report_threads(keeper)
    replier, pid = load(watcher).begin(keeper) if watcher else None, os.getpid()

    def ended(error: BaseException | None) -> None:
        if os.getpid() != pid:
            return  # a fork of the script returned here
        end = describe.end(error) if error else {"exit_code": 0}
        if end["exit_code"]:
            more = replier.failed(error) if replier else {}
            end["notes"] = [*end["notes"], *more.pop("notes", ())]
            keeper.send({"end": end, **more})  # `end` first: keeper.py looks for it there
            return
        keeper.send({"script_ended": {"alone": bool(replier and replier.is_alone())}})
        if replier:
            replier.script_ended()

    return ended


def run_script(main: types.ModuleType, path: str) -> None:
    """Run a file, or a folder or archive with a __main__, as `python path` does."""
    full = os.path.join(os.getcwd(), path)  # Python does not normalize it either
    importlib.machinery.PathFinder.find_spec("__main__", [full])
    if sys.path_importer_cache.get(full) is not None:  # Python can import from it
        _set_first_path(full, always=True)
        import runpy

        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    main.__file__ = full
    main.__dict__["__cached__"] = None
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    with io.open_code(full) as file:
        source = file.read()
    if path.endswith(".pyc") or source[:2] == importlib.util.MAGIC_NUMBER[:2]:
        loader: Any = importlib.machinery.SourcelessFileLoader("__main__", full)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", full)
        code = compile(source, full, "exec", dont_inherit=True)
    main.__loader__ = loader
    exec(code, main.__dict__)


def run_module(name: str) -> None:
    """Run a module as `python -m name` does."""
    _set_first_path(os.getcwd())
    sys.argv[0] = "-m"
    import runpy

    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _set_first_path(folder: str, *, always: bool = False) -> None:
    """Put folder in the place of this file's in sys.path; if there is none, only if `always`."""
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def wrap_hook() -> None:
    """Have the current hook show tracebacks without this file's frames."""
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        return  # the script has deleted it; Python reports that

    def show(kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
        trace = describe.own_frames(trace)
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def main() -> None:
    """Run the script or module that the arguments name, and exit as it does."""
    kind, target = sys.argv[1:3]
    del sys.argv[:2]
    ended = connect()
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = module
    if "multiprocessing" in sys.modules:  # it was imported before, and has that name for __main__
        sys.modules["__mp_main__"] = module
    try:
        if kind == "script":
            run_script(module, target)
        else:
            run_module(target)
    except BaseException as error:
        ended(error)
        wrap_hook()
        raise
    ended(None)  # threads and exit handlers may run on, and may fail


if __name__ == "__main__":
    main()
