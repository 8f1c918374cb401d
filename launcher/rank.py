"""Runs the user's script in a rank's process, and tells the launcher how it ended.

Executed by torchrun in place of the script: `python rank.py script PATH ARGUMENT ...` or
`python rank.py module NAME ARGUMENT ...`. The script must not notice: its `__main__`,
`sys.argv`, `sys.path[0]`, exit code, traceback and child processes are those of
`python PATH ARGUMENT ...`. What torchrun cannot tell is which exception ended a rank
(torch.distributed.elastic asks for `@record` around main for that), and when.

The connection to the launcher stays open as long as the process lives, so its end is the
news of a rank that was killed without a word.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import traceback
import types
from typing import Any, Callable

# Bounds of what is sent, in characters: people see 1,024 of it.
_MESSAGE = 1000
_FRAMES, _LINE = 3000, 200

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
            connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    try:
        connection.connect(os.path.join(run_dir, "socket"))
    except OSError:
        return lambda message: None
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
    os.register_at_fork(after_in_child=connection.close)
    return send


def script_code(main: types.ModuleType, path: str) -> types.CodeType:
    """Prepare main and sys.path as `python path` does; return the script's code."""
    full = os.path.join(os.getcwd(), path)  # Python does not tidy it up either
    main.__file__ = full
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", full)
    main.__dict__["__cached__"] = None
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    with io.open_code(full) as file:
        return compile(file.read(), full, "exec", dont_inherit=True)


def module_code(main: types.ModuleType, name: str) -> types.CodeType:
    """Prepare main and sys.path as `python -m name` does; return the module's code.

    Raises ImportError where there is no such module, or nothing in it to execute.
    """
    _set_first_path(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(name + ".__main__")
    code: types.CodeType | None = None
    if spec is not None and hasattr(spec.loader, "get_code"):
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    if spec is None or code is None:
        raise ImportError(f"no module named {name}, or a package without __main__")
    main.__spec__ = spec
    main.__package__ = spec.parent
    main.__loader__ = spec.loader
    main.__file__ = spec.origin
    main.__dict__["__cached__"] = spec.cached
    sys.argv[0] = spec.origin or name
    return code


def _set_first_path(folder: str) -> None:
    """Put folder where this file's own folder stands; nowhere if Python was told not to."""
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = folder


def own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of this file in front."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def describe(error: BaseException) -> dict[str, Any]:
    """Return what the launcher should know of the exception that ends this process.

    Keys: exit_code (negative for a signal), exception, message, frames (innermost last).
    """
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    exit_code = 1
    try:
        message = str(error)
    except Exception:
        message = "(its text cannot be shown)"
    if isinstance(error, SystemExit):
        name = ""
        if error.code is None or isinstance(error.code, int):
            exit_code, message = (error.code or 0) & 0xFF, ""
    elif isinstance(error, KeyboardInterrupt):
        exit_code = -signal.SIGINT
    shown = traceback.format_tb(own_frames(error.__traceback__)) if name else []
    frames = "\n".join(line[:_LINE] for line in "".join(shown).splitlines())
    if len(message) > _MESSAGE:
        # What a data loader's worker raised stands at the end of a long text.
        message = f"{message[: _MESSAGE // 2]} ... {message[-_MESSAGE // 2 :]}"
    return {
        "exit_code": exit_code,
        "exception": name,
        "message": message,
        "frames": frames[-_FRAMES:],
    }


def hide_own_frames() -> None:
    """Have the traceback shown without this file's frames, by whichever hook there is now."""
    hook = sys.excepthook

    def show(kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
        trace = own_frames(trace)
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def main() -> None:
    """Run the script or module that the arguments name, and end as it ends."""
    kind, target = sys.argv[1:3]
    del sys.argv[:2]
    send = connect()
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = module
    try:
        prepare = script_code if kind == "script" else module_code
        exec(prepare(module, target), module.__dict__)
    except BaseException as error:
        end = describe(error)
        if end["exit_code"]:
            send({"end": end})
        hide_own_frames()
        raise


if __name__ == "__main__":
    main()
