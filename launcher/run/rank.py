"""Runs the user's script in a rank's process, and reports how it ended.

Executed by torchrun in place of the script: `python rank.py script PATH ARGUMENT ...` or
`python rank.py module NAME ARGUMENT ...`. The script must not notice: its `__main__`,
`sys.argv`, `sys.path[0]`, exit code, traceback and child processes are those of
`python PATH ARGUMENT ...`. What torchrun cannot tell is which exception ended a rank
(torch.distributed.elastic asks for `@record` around main for that), and when.

Before the script runs, this process becomes the launcher's own child, and waits for its reply (go):
so no rank runs that the launcher does not know, and it alone ends and reaps ranks.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import signal
import sys
import types

# As they are now: a script may put its own in their place (gevent).
from _thread import allocate_lock
from collections.abc import Iterator
from json import dumps, loads
from socket import AF_UNIX, MSG_PEEK, SOCK_STREAM, socket
from time import sleep
from typing import Any, Callable, Optional

Sender = Callable[[dict[str, Any]], None]
Forked = Optional[tuple[int, int]]  # a pipe to write to once the launcher knows it; parent's pid

_ARGV = getattr(sys, "orig_argv", None) or [sys.executable, "-u", *sys.argv]  # from Python 3.10 on
_FORKED = "LAUNCHER_FORKED"  # in a process that has been forked, and has started Python anew


class RankConnection:
    """A rank's, to the launcher whose socket is in a folder. Raises OSError if it is gone.

    Once the script runs, that must not be its loss: what cannot be sent is not.
    """

    def __init__(self, run_dir: str) -> None:
        self._pid = os.getpid()
        self._is_sending = allocate_lock()  # threads raise at any time
        self._connection = socket(AF_UNIX, SOCK_STREAM)
        self._connection.settimeout(5)
        self._connection.connect(os.path.join(run_dir, "socket"))
        self._identity = self._status()
        # Forked data loaders must not hold the connection when this process is gone.
        os.register_at_fork(after_in_child=self.close)

    def _status(self) -> tuple[int, int]:
        status = os.fstat(self._connection.fileno())
        return status.st_dev, status.st_ino

    def _is_ours(self) -> bool:
        """Tell whether the descriptor is what it was: a script may close all that it sees."""
        return self._status() == self._identity

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, but not from a fork of the script's that came back here."""
        with contextlib.suppress(OSError):
            if os.getpid() == self._pid and self._is_ours():
                text = dumps(message, ensure_ascii=False) + "\n"
                data = text.encode("utf-8", "surrogatepass")  # as json has it
                with self._is_sending:
                    self._connection.sendall(data)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Wait for what the launcher requests, for as long as the connection is there."""
        self._connection.settimeout(None)
        rest = b""
        while self._is_ours() and (data := self._connection.recv(4096)):
            *lines, rest = (rest + data).split(b"\n")
            yield from map(loads, lines)

    def lets_go(self) -> bool:
        """Wait for the launcher's word that the script may run; False: it must not."""
        with contextlib.suppress(OSError):
            self._connection.settimeout(None)
            return self._connection.recv(16).startswith(b"go")
        return False

    def is_there(self) -> bool:
        """Tell whether the launcher still is."""
        self._connection.settimeout(0)
        try:
            return bool(self._connection.recv(1, MSG_PEEK))
        except BlockingIOError:
            return True
        finally:
            self._connection.settimeout(5)

    def fileno(self) -> int:
        """Return the connection's descriptor."""
        return self._connection.fileno()

    def close(self) -> None:
        """Hang up; also in what the script has forked."""
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._connection.close()


def become_child(
    run_dir: str, hello: Callable[[], dict[str, Any]], forked: Forked
) -> RankConnection:
    """Fork; return, in a process that is the launcher's child, and has its reply, the connection.

    The launcher adopts orphans (PR_SET_CHILD_SUBREAPER). This process ends with 0 once the launcher
    knows the other one (hello), or as that ends. A refused process ends before its script runs.
    `forked` is what fork_for_launcher() returns where that has been done.
    """
    if _FORKED in os.environ:
        knows, parent = map(int, os.environ.pop(_FORKED).split())
    else:
        knows, parent = forked or fork_for_launcher()
    try:
        launcher = RankConnection(run_dir)
        launcher.send(hello())
        with contextlib.suppress(BrokenPipeError):  # that was killed: this is a rank all the same
            os.write(knows, b".")
        os.close(knows)
        while os.getppid() == parent:  # that is not to be there any more once this has ended
            sleep(0.0005)
        if launcher.lets_go():
            _end_with_parent()
            if launcher.is_there():  # or it may have been killed before that
                return launcher
    except OSError:
        pass  # it has been killed
    os._exit(128 + signal.SIGTERM)


def fork_for_launcher() -> tuple[int, int]:
    """Return in a child: what to write to when the launcher knows it, and its parent's pid.

    The parent ends then, with 0, and the launcher adopts the child; or as the child has before.
    """
    is_known, knows = os.pipe()
    parent, threads = os.getpid(), len(os.listdir("/proc/self/task"))
    if threads > 1:  # of which Python warns from 3.12 on; but the fork starts Python anew
        import warnings

        warnings.simplefilter("ignore", DeprecationWarning)
    pid = os.fork()
    if pid:
        os.close(knows)
        if os.read(is_known, 1):
            os._exit(0)
        _end_as(pid)
    os.close(is_known)
    os.setsid()
    if threads > 1:  # of sitecustomize, say: a fork has none of them, a new Python starts its own
        os.environ[_FORKED] = f"{knows} {parent}"
        os.set_inheritable(knows, True)
        os.execv(sys.executable, _ARGV)
    return knows, parent


def _end_as(pid: int) -> None:
    """End as a child has; the launcher, which may know that, reaps it."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no other
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code or 1)


def _end_with_parent() -> None:
    """Have the kernel send this process SIGTERM if the launcher is killed, which cannot do it."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG of linux/prctl.h


def connect(describe: types.ModuleType, forked: Forked) -> tuple[Sender, Callable[[], None]]:
    """Become a rank that the launcher knows, where there is a launcher.

    Returns the way to report more, and what to call once the script has ended.
    """
    nobody: tuple[Sender, Callable[[], None]] = (lambda message: None), (lambda: None)
    if "LAUNCHER_RUN_DIR" not in os.environ:
        return nobody
    rank = {"rank": int(os.environ["RANK"]), "local_rank": int(os.environ["LOCAL_RANK"])}
    launcher = become_child(
        os.environ["LAUNCHER_RUN_DIR"], lambda: {**rank, "pid": os.getpid()}, forked
    )
    run_dir, watcher = os.environ.pop("LAUNCHER_RUN_DIR"), os.environ.pop("LAUNCHER_WATCHER", "")
    load(beside("unseen.py")).begin(run_dir, launcher.send, describe, __file__)
    keep_replying = nobody[1]
    if watcher:
        hello = {**rank, "watch": os.getpid()}
        keep_replying = load(watcher).begin(lambda: RankConnection(run_dir), hello)

    def script_ended() -> None:
        launcher.send({**rank, "script_ended": os.getpid()})
        keep_replying()

    return launcher.send, script_ended


def script_code(main: types.ModuleType, path: str) -> types.CodeType:
    """Prepare main and sys.path as `python path` does; return the script's code.

    Raises ImportError for a folder or an archive without __main__, and a damaged .pyc file.
    """
    full = os.path.join(os.getcwd(), path)  # Python does not tidy it up either
    spec = importlib.machinery.PathFinder.find_spec("__main__", [full])
    if spec is not None:
        _set_first_path(full, always=True)
        return _code_of(main, spec)
    if sys.path_importer_cache.get(full) is not None:
        raise ImportError(f"can't find '__main__' module in {path!r}")
    main.__file__ = full
    main.__dict__["__cached__"] = None
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    with io.open_code(full) as file:
        source = file.read()
    if path.endswith(".pyc") or source[:2] == importlib.util.MAGIC_NUMBER[:2]:
        loader = importlib.machinery.SourcelessFileLoader("__main__", full)
        main.__loader__ = loader
        return _code_by(loader, "__main__")
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", full)
    return compile(source, full, "exec", dont_inherit=True)


def module_code(main: types.ModuleType, name: str) -> types.CodeType:
    """Prepare main and sys.path as `python -m name` does; return the module's code.

    Raises ImportError if there is no such module, or nothing in it to execute.
    """
    _set_first_path(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(name + ".__main__")
    if spec is None:
        raise ImportError(f"no module named {name}, or a package without __main__")
    code = _code_of(main, spec)
    sys.argv[0] = spec.origin or name
    return code


def _code_of(main: types.ModuleType, spec: importlib.machinery.ModuleSpec) -> types.CodeType:
    """Prepare main as the module of spec; return its code."""
    code = _code_by(spec.loader, spec.name)
    main.__spec__ = spec
    main.__package__ = spec.parent
    main.__loader__ = spec.loader
    main.__file__ = spec.origin
    main.__dict__["__cached__"] = spec.cached
    return code


def _code_by(loader: Any, name: str) -> types.CodeType:
    code = loader.get_code(name) if hasattr(loader, "get_code") else None
    if not isinstance(code, types.CodeType):
        raise ImportError(f"cannot load the code of {name}")
    return code


def _set_first_path(folder: str, *, always: bool = False) -> None:
    """Put folder where this file's own folder stands; if Python was told not to, only always."""
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def beside(name: str) -> str:
    """Return the path of a file beside this one."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)


def load(path: str) -> types.ModuleType:
    """Load a file of the launcher's, out of the script's sight."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wrap_hook(describe: types.ModuleType) -> None:
    """Have the traceback shown without this file's frames, by whichever hook there is now."""
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        return  # deleted by the script; Python has words for that

    def show(kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
        trace = describe.own_frames(trace, __file__)
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def main(forked: Forked = None) -> None:
    """Run the script or module that the arguments name, and end as it ends."""
    kind, target = sys.argv[1:3]
    del sys.argv[:2]
    describe = load(beside("describe.py"))
    send, script_ended = connect(describe, forked)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # multiprocessing was imported before this process was forked
        sys.modules["__mp_main__"] = module
    try:
        prepare = script_code if kind == "script" else module_code
        exec(prepare(module, target), module.__dict__)
    except BaseException as error:
        end = describe.end(error, __file__)
        if end["exit_code"]:
            send({"end": {**end, "killed": describe.killed(error)}})
        else:
            script_ended()
        wrap_hook(describe)
        raise
    script_ended()  # threads and exit handlers may run on, and may fail


if __name__ == "__main__":
    main()
