"""Runs the user's script in a rank's process, and tells the launcher how it ended.

Executed by torchrun in place of the script: `python rank.py script PATH ARGUMENT ...` or
`python rank.py module NAME ARGUMENT ...`. The script must not notice: its `__main__`,
`sys.argv`, `sys.path[0]`, exit code, traceback and child processes are those of
`python PATH ARGUMENT ...`. What torchrun cannot tell is which exception ended a rank
(torch.distributed.elastic asks for `@record` around main for that), and when.

The connection to the launcher stays open, so its end is the first news of a rank that was killed
without a word. It ends, too, if the script closes all descriptors, or replaces its process.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import socket
import sys
import types
from typing import Any, Callable

Send = Callable[[dict[str, Any]], None]


def connect() -> Send:
    """Tell the launcher that this rank is there; return the way to tell it more.

    Without a launcher, or with one that is gone, nothing is sent: that is its loss, and
    must not be the script's.
    """
    run_dir = os.environ.pop("LAUNCHER_RUN_DIR", None)
    if run_dir is None:
        return lambda message: None
    pid = os.getpid()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)

    def send(message: dict[str, Any]) -> None:
        if os.getpid() != pid:
            return  # a fork of the script's that came back here
        try:
            if still_ours():
                text = json.dumps(message, ensure_ascii=False) + "\n"
                connection.sendall(text.encode("utf-8", "surrogatepass"))  # as json.loads has it
        except OSError:
            pass

    def still_ours() -> bool:
        """Tell whether the descriptor is what it was: a script may close all that it sees."""
        status = os.fstat(connection.fileno())
        return (status.st_dev, status.st_ino) == identity

    def leave() -> None:
        with contextlib.suppress(OSError):
            if still_ours():
                connection.close()

    try:
        connection.connect(os.path.join(run_dir, "socket"))
    except OSError:
        return lambda message: None
    status = os.fstat(connection.fileno())
    identity = (status.st_dev, status.st_ino)
    environ = os.environ
    send(
        {
            "rank": int(environ["RANK"]),
            "local_rank": int(environ["LOCAL_RANK"]),
            "pid": pid,
            "max_restarts": int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)),
            "restart": int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        }
    )
    # Forked data loaders must not hold the connection when this process is gone, nor may it
    # be closed before: not by this module's end, hence the reference in `send`.
    os.register_at_fork(after_in_child=leave)
    return send


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


def beside(name: str) -> types.ModuleType:
    """Load the file name.py of this folder, out of the script's sight."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"launcher.run.{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wrap_hook(send: Send, describe: types.ModuleType) -> None:
    """Have the traceback shown without this file's frames, by whichever hook there is now.

    A hook that returns leaves Python to end with the code that was told: that is final.
    """
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        return  # deleted by the script; Python has words for that

    def show(kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
        trace = describe.own_frames(trace, __file__)
        hook(kind, error.with_traceback(trace), trace)
        send({"final": True})

    sys.excepthook = show


def main() -> None:
    """Run the script or module that the arguments name, and end as it ends."""
    kind, target = sys.argv[1:3]
    del sys.argv[:2]
    send, describe = connect(), beside("describe")
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = module
    try:
        prepare = script_code if kind == "script" else module_code
        exec(prepare(module, target), module.__dict__)
    except BaseException as error:
        end = describe.end(error, __file__)
        if end["exit_code"]:
            send({"end": {**end, "final": isinstance(error, SystemExit)}})
        wrap_hook(send, describe)
        raise


if __name__ == "__main__":
    main()
