"""Runs the user's script in a rank's process, and reports how it ended.

Executed by the rank's keeper: `python rank.py script PATH ARGUMENT ...` or `python rank.py module
NAME ARGUMENT ...`; or imported by warm.py. The script must not notice: its `__main__`, `sys.argv`,
`sys.path[0]`, exit code, traceback and child processes are those of `python PATH ARGUMENT ...`.
From outside, nobody can tell which exception ended a rank, and when; nor where it crashed, nor what
its threads raised.

Its messages to the launcher, which the keeper passes on to keepers.py (`_said`):

    script_ended: isolated            when the script has ended by itself
    end, groups                       why it failed (`exit_of`), and its process groups
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
import signal
import sys
import threading
import time
import traceback
import types
import weakref

# Bound before the script runs, which may replace them (gevent).
from _thread import allocate_lock
from collections.abc import Iterator
from itertools import islice
from json import dumps, loads
from os.path import dirname
from socket import SO_SNDTIMEO, SOL_SOCKET, socket
from struct import pack
from time import monotonic
from typing import Any, Callable

_SEND_SECONDS = 1  # for the keeper to take a message
_HIGHEST, _FEW = 1008, 256  # of descriptors; with no room above _FEW it stays where it is
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_SELDOM = 1.0  # seconds, at least, between two reported exceptions of threads
# Limits of an end's texts, in characters. People see 1,024, but an exception may hold the text of
# another process's whole traceback, whose end matters most (causes.py reads it). The total stays
# below the limit of lines.py, 1 MiB, at 6 bytes a character (a control character in JSON).
_BEGIN, _END = 1000, 5000
_FRAMES, _LINE, _NAME, _FACT = 3000, 200, 300, 400
_THREAD = 100  # of a thread's name
_LINKS = 6  # at most, of a chain's exceptions: from its start, from its end, and hidden ones
_WALK = 10_000  # exceptions to walk through for its end
# Modules that know their child processes; torch.multiprocessing's are in the first.
_MULTIPROCESSING = ("multiprocessing.process", "multiprocess.process")
_SIGNALS = {one.value: f"{one.name} (signal {one.value})" for one in signal.Signals}
_TO_DIE = 0.2  # s between the end of a process's connections and its own end
_RUN = os.path.dirname(os.path.abspath(__file__))
_OURS = (_RUN, os.path.join(os.path.dirname(_RUN), "warm"))
_ORIGINS = ("__cause__", "__context__", "__suppress_context__")


def load(path: str) -> types.ModuleType:
    """Load a file of the launcher, invisibly for the script."""
    module = types.ModuleType(os.path.basename(path)[:-3])
    module.__file__ = path
    importlib.machinery.SourceFileLoader(module.__name__, path).exec_module(module)
    return module


class KeeperConnection:
    """The process's end of the socket to its keeper.

    It must never harm the script: after a message that cannot be sent it is closed, and sends no
    more. Raises OSError if the descriptor is no socket.
    """

    def __init__(self, descriptor: int) -> None:
        self._pid = os.getpid()
        self._is_sending = allocate_lock()  # threads may raise at any time
        self._socket = socket(fileno=_out_of_the_way(descriptor))
        self._socket.set_inheritable(False)
        self._socket.settimeout(None)  # sitecustomize may have called setdefaulttimeout()
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
    soft = os.sysconf("SC_OPEN_MAX")  # -1: no limit
    high = _HIGHEST if soft < 0 else min(soft - 16, _HIGHEST)
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
            error, is_due = args.exc_value, monotonic() - reported_at >= _SELDOM
            if error is not None and is_due and not issubclass(args.exc_type, SystemExit):
                reported_at = monotonic()
                name = "" if args.thread is None else str(args.thread.name)[:_THREAD]
                keeper.send({"thread": {"name": name, "end": exit_of(error)}})
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
        # The script's signal handlers, or functions that it has replaced, may raise SystemExit.
        with contextlib.suppress(BaseException):
            if os.getpid() != pid:
                return  # a fork of the script returned here
            end: dict[str, Any] = {"exit_code": 0} if error is None else exit_of(error)
            if end["exit_code"]:
                more = replier.failed(error) if replier else {}
                end["facts"] = [*end["facts"], *more.pop("facts", ())]
                keeper.send({"end": end, **more})  # `end` first: keeper.py looks for it there
                return
            keeper.send({"script_ended": {"isolated": bool(replier and replier.is_isolated())}})
            if replier:
                replier.script_ended()

    return ended


# What ended the script, in the form that result/causes.py reads. Reading an exception's attributes
# may run the script's code: whatever that raises must not change how the script ends.


def own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without its first frames, those of this file and of what runs it."""
    while trace is not None and dirname(trace.tb_frame.f_code.co_filename) in _OURS:
        trace = trace.tb_next
    return trace


def exit_of(error: BaseException) -> dict[str, Any]:
    """Return what the launcher should know of the exception that ends this process.

    If the exit code is not 0, the result has more fields of causes.Exit, and `counted`
    (clues.behind).
    """
    found: dict[str, Any] = {"exit_code": 1, "chain": [], "facts": []}
    try:
        if issubclass(type(error), SystemExit):
            code = getattr(error, "code", 1)
            code = 0 if code is None else code
            if issubclass(type(code), int):
                # As Python does it: a C long, of which wait(2) returns eight bits.
                code = int.__add__(code, 0)
                found["exit_code"] = code & 0xFF if -(2**63) <= code < 2**63 else 255
            if not found["exit_code"]:
                return found
        elif type(error) is KeyboardInterrupt:
            found["exit_code"] = -signal.SIGINT
        links = came_from(error)
        errors = [link for link, _ in links]
        for link, how in links:
            with contextlib.suppress(BaseException):  # one that cannot be described
                found["chain"].append(described(link, how))
        is_broken = any(map(_is_broken_connection, errors))
        found["facts"] = killed() if is_broken else []
        text = "\n".join(f"{link['exception']}: {link['message']}" for link in found["chain"])
        clues: Any = load(os.path.join(_RUN, "clues.py"))
        more = clues.behind(text, errors)
        more["counted"] += ["memory"] * is_broken
        facts = [fact[:_FACT] for fact in (*found["facts"], *more["facts"])]
        found |= {**more, "facts": facts}
    except BaseException:
        pass  # a property or signal handler has raised, no memory is left: the exit code suffices
    return found


def killed() -> list[str]:
    """Return that a process of multiprocessing was killed, in words, if one was.

    To be called if a connection to one broke. A process that SIGTERM has ended does not count:
    somebody ended it.
    """
    by = monotonic() + _TO_DIE
    with contextlib.suppress(BaseException):  # an unknown Python; a signal handler of the script
        while monotonic() < by:
            modules = map(sys.modules.get, _MULTIPROCESSING)
            children = [child for module in modules for child in getattr(module, "_children", ())]
            for child in children:
                number = -(child.exitcode or 0)
                if number > 0 and number != signal.SIGTERM:
                    how = _SIGNALS.get(number, f"signal {number}")
                    name = f"{str(child.name)[:_NAME]} (pid {child.pid})"
                    return [f"its child process {name} was killed by {how}"]
            if not children:
                break
            time.sleep(0.01)  # gevent's, if the script uses that: it lets us see the child's end
    return []


def _is_broken_connection(error: BaseException) -> bool:
    """Tell whether an exception is about a broken connection to a process of multiprocessing."""
    if not isinstance(error, (EOFError, ConnectionError)):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = os.path.basename(os.path.dirname(files[-1])) if files else ""
    return package in ("multiprocessing", "multiprocess")


def came_from(error: BaseException) -> list[tuple[BaseException, str]]:
    """Return an exception and those that it came from, each with its relation to the one before
    it (causes.Link, `how`).

    First those that Python would print, outermost first; then those that it hides. A group's first
    member stands for the group: its origins are listed and, if Python would print any of them, the
    group's own are hidden.
    """
    shown: list[tuple[BaseException, str]] = []
    hidden: list[tuple[BaseException, str]] = []
    todo = [(error, "")]
    seen: set[int] = set()
    while todo and len(seen) < _WALK:
        link, how = todo.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        (hidden if how == "hidden" else shown).append((link, how))
        origins, first = _origins(link), members(link)[0]
        if first is not link:
            of_first = _origins(first)
            if any(way != "hidden" for _, way in of_first):
                origins = [(one, "hidden") for one, _ in origins]
            origins += of_first
        todo += [(one, "hidden" if how == "hidden" else way) for one, way in origins]
    return shown[:_LINKS] + shown[_LINKS:][-_LINKS:] + hidden[:_LINKS]


def _origins(error: BaseException) -> list[tuple[BaseException, str]]:
    """Return the exceptions that an exception itself came from, the nearest last."""
    # Read them from the base class as Python does: a subclass may hide them.
    cause, context, silent = (BaseException.__dict__[name].__get__(error) for name in _ORIGINS)
    found = [(context, "hidden" if silent or cause is not None else "context"), (cause, "cause")]
    return [(one, how) for one, how in found if one is not None]


def described(error: BaseException, how: str) -> dict[str, str]:
    """Return one exception of a chain, as the fields of causes.Link."""
    inner = members(error)
    message = text_of(error)
    if inner[0] is not error:
        inside = "; ".join(f"{name_of(one)}: {text_of(one)[:300]}" for one in inner)
        message = f"{message[:_BEGIN]}: {inside}"
    if isinstance(error, SystemExit) and isinstance(error.code, (int, type(None))):
        message = ""  # its output may say more (clues.py)
    return {
        "exception": "" if isinstance(error, SystemExit) else name_of(error),
        "message": message,
        "frames": frames_of(inner[0]) or frames_of(error),
        "how": how,
    }


def members(error: BaseException) -> list[BaseException]:
    """Return a group's first exceptions, also from nested groups; or error itself."""
    group: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11
    found: list[BaseException] = []
    todo = [error]
    while todo and len(found) < 3:
        one = todo.pop(0)
        if issubclass(type(one), group):  # read them from the base class, as in `_origins`
            todo[:0] = group.exceptions.__get__(one)[:3]
        else:
            found.append(one)
    return found


def name_of(error: BaseException) -> str:
    """Return the name of an exception's class as a traceback has it."""
    kind = type(error)
    module = kind.__module__
    if not isinstance(module, str) or module in ("builtins", "__main__", "__mp_main__"):
        return kind.__qualname__[-_NAME:]
    return f"{module}.{kind.__qualname__}"[-_NAME:]


def text_of(error: BaseException) -> str:
    """Return an exception's text and notes, cut in the middle if they are long."""
    parts: list[object] = [error]
    with contextlib.suppress(BaseException):  # the script's own code
        notes = getattr(error, "__notes__", ())  # Python 3.11
        parts += islice(notes, 9) if isinstance(notes, (list, tuple)) else ()
    return cut("\n".join(map(_shown, parts)))


def _shown(value: object) -> str:
    try:
        return cut(str(value))
    except BaseException:  # whatever the script's own __str__ raises
        return "(its text cannot be shown)"


def cut(text: str) -> str:
    """Return a text, without its middle if it is long."""
    return text if len(text) <= _BEGIN + _END else f"{text[:_BEGIN]} ... {text[-_END:]}"


def frames_of(error: BaseException) -> str:
    """Return an exception's innermost frames, as a traceback prints them but for its `^^^`."""
    try:
        lines = "".join(traceback.format_tb(own_frames(error.__traceback__), -50)).splitlines()
    except Exception:  # a loader of the script cannot show its source
        return ""
    return "\n".join(line[:_LINE] for line in lines if line.strip(" ~^"))[-_FRAMES:]


# The script.


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
    if sys.path[:1] == [os.path.dirname(os.path.realpath(__file__))]:  # Python resolves links
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def wrap_hook() -> None:
    """Have the current hook show tracebacks without this file's frames."""
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        return  # the script has deleted it; Python reports that

    def show(kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
        with contextlib.suppress(BaseException):  # a signal handler of the script may raise
            trace = own_frames(trace)
            BaseException.with_traceback(error, trace)
        hook(kind, error, trace)

    sys.excepthook = show


def main() -> None:
    """Run the script or module that the arguments name, and exit as it does."""
    kind, target = sys.argv[1:3]
    del sys.argv[:2]
    ended = connect()
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
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
        with contextlib.suppress(BaseException):  # a signal handler of the script may raise
            wrap_hook()
        raise
    ended(None)  # threads and exit handlers may run on, and may fail


if __name__ == "__main__":
    main()
