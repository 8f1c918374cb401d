"""Imports torch once for its host, and forks the ranks' keepers, whose scripts are forks, too.

Executed by path with the path of its socket, the script's folder, modules to import besides torch,
and the descriptor of its socket to the launcher. It starts when the plan is made, so that its
imports overlap with joining; stubs send it their state (handover.py). It ends when all keepers are
forked, or with the launcher.

    stub             torchrun's child, waits for the keeper's exit code
    warm.py
     └─ guard        ends the leftovers of a killed keeper, as a cold start's stub does
         └─ keeper   run/keeper.py; it sends the stub the exit code itself
             └─ the script

A fork is not a new Python: as_new repairs it as far as possible. why_unfit checks first for state
that forks would share or lose: then all starts are cold.
"""

from __future__ import annotations

import sys

BEFORE = frozenset(sys.modules)  # as a script finds them

# ruff: noqa: E402
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import threading
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
RUN = os.path.join(os.path.dirname(HERE), "run")
# Our modules must not hide others, nor may this folder stay in sys.path. If Python was told to
# leave a script's folder out of it, the ranks' is left out, too.
IS_FIRST = sys.path[:1] == [HERE]
sys.path[:IS_FIRST] = [RUN, HERE]
import handover  # type: ignore[import-not-found]
import keeper  # type: ignore[import-not-found]
import rank  # type: ignore[import-not-found]

del sys.path[:2]
for name in {*sys.modules} - BEFORE:
    if os.path.dirname(getattr(sys.modules[name], "__file__", None) or "") in (RUN, HERE):
        del sys.modules[name]
_FINDERS = {"BuiltinImporter", "FrozenImporter", "PathFinder"}  # of Python itself
# Finders that .pth files install, with or without a sitecustomize: setuptools' and virtualenv's.
_OF_PTH_FILES = ("_distutils_hack", "__editable__", "_virtualenv")
_REQUEST_SECONDS = 20.0  # for a connected stub to send its request, on a busy machine
_before = dict(os.environ)  # before the imports


# Whether forks can be like new processes.


def why_unfit(folder: str, preload: list[str]) -> str:
    """Import all; return why forks would differ from new processes, "" if they would not."""
    if hooks := _hooks():
        return f"{hooks} changes how Python imports modules"
    known, folder_before, handlers = _descriptors(), os.getcwd(), _handlers()
    for name in ("torch", "torch.distributed", *preload):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            return f"importing {name} failed with {type(error).__name__}: {error}"
    mine = {name.partition(".")[0] for name in set(sys.modules) - BEFORE}
    if hidden := sorted(name for name in mine & _modules_in(folder) if not _is_in(folder, name)):
        return f"{hidden[0]} is loaded, and would hide the {hidden[0]} in {folder}"
    if opened := sorted(_descriptors() - known):
        return f"an import has opened {_opened(opened[0])}"
    if os.getcwd() != folder_before:
        return f"an import has changed the current folder to {os.getcwd()}"
    if changed := sorted(_handlers().items() - handlers.items()):
        return f"an import has set a handler for signal {changed[0][0]}"
    if problem := _problem_in_a_fork():
        return problem
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # OpenBLAS ends its threads at a fork
        return f"an import has started a thread ({threads} are running)"
    return "an import has started a process" if keeper.below(os.getpid()) else ""


def _hooks() -> str:
    """Return the name of a site module that hooks imports: it may read RANK."""
    own = next((one for one in ("sitecustomize", "usercustomize") if one in sys.modules), "")
    finders = {
        getattr(one, "__name__", type(one).__name__)
        for one in sys.meta_path
        if not getattr(one, "__module__", "").startswith(_OF_PTH_FILES)
    }
    is_hooked = finders - _FINDERS or not isinstance(builtins.__import__, type(len))
    return own if own and is_hooked else ""


def _modules_in(folder: str) -> set[str]:
    """Return the names of the modules that a script finds in its folder."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder or os.curdir)
    inits = (os.path.join(folder, name, "__init__.py") for name in names)
    packages = {name for name, init in zip(names, inits) if os.path.exists(init)}
    files = (name for name in names if name.endswith((".py", ".pyc", ".so")))
    return packages | {name.partition(".")[0] for name in files}


def _is_in(folder: str, name: str) -> bool:
    """Tell whether a loaded module is the script's own (through PYTHONPATH, say)."""
    file = getattr(sys.modules.get(name), "__file__", None)
    parts = os.path.realpath(folder or os.curdir), os.path.realpath(file or os.sep)
    return os.path.commonpath(parts) == parts[0]


def _descriptors() -> set[int]:
    listed = map(int, os.listdir("/proc/self/fd"))
    return {one for one in listed if _opened(one)}  # not the listing's own


def _opened(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def _handlers() -> dict[int, int]:
    """Return which signals have which handlers."""
    return {int(number): id(signal.getsignal(number)) for number in signal.valid_signals()}


def _problem_in_a_fork() -> str:
    """Return what goes wrong in a fork, "" for nothing."""
    import torch

    problems = {  # by wait statuses of exit codes
        0: "",
        1 << 8: "an import has initialized CUDA, which cannot be used after a fork",
        2 << 8: "an import has each fork start a thread",
    }
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(Exception):
            is_bad = getattr(torch._C, "_cuda_isInBadFork", bool)()
            os._exit(1 if is_bad else 2 * (len(os.listdir("/proc/self/task")) > 1))
        os._exit(3)
    return problems.get(os.waitpid(pid, 0)[1], "a fork of it fails")


# Forks.


class Forked(BaseException):
    """Ends the keeper's loop in the fork that becomes the script."""


def serve(listener: socket.socket, launcher: socket.socket) -> tuple[dict[str, Any], int]:
    """Fork a keeper for each stub; return, in the keeper, the stub's request and the descriptor of
    the stub's connection.

    This process ends once it has forked all keepers of its host.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps all that it forks
    policy, left = handover.memory_policy(), 0
    while True:
        ready = select.select([listener, launcher], [], [])[0]
        if launcher in ready:  # it never sends anything: it has ended
            os._exit(0)
        connection = listener.accept()[0]
        connection.settimeout(_REQUEST_SECONDS)
        request: dict[str, Any] = {}
        descriptors: list[int] = []
        pid = -1
        with contextlib.suppress(OSError, ValueError):  # the stub is gone; no process is left
            request, descriptors = handover.receive(connection)
            if request["policy"] != policy:
                end(launcher, {"unfit": f"the memory of ranks has the policy {request['policy']}"})
            pid = os.fork()
        if pid == 0:
            listener.close()
            launcher.close()
            return request, guard(connection, request, descriptors)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            left = (left or int(request["environ"]["LOCAL_WORLD_SIZE"])) - 1
        if pid > 0 and not left:
            end(launcher, {"done": True})


def end(launcher: socket.socket, message: dict[str, Any]) -> NoReturn:
    """Tell the launcher why this process is not needed any more, and end it."""
    with contextlib.suppress(OSError):  # the launcher is gone
        launcher.sendall(json.dumps(message).encode() + b"\n")
    os._exit(0)


def guard(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    """Be the guard of a keeper; return, in the keeper, the descriptor of its stub's connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in keeper.STOPS:
        signal.signal(number, signal.SIG_IGN)
    try:
        handover.become(request, descriptors)
        connection.settimeout(None)
        connection.sendall(handover.FORKED)
        if connection.recv(1) != handover.GO:
            os._exit(0)
        keeper.adopt_orphans()
        pid = os.fork()
    except Exception:  # the stub hears nothing more
        os._exit(1)
    if pid == 0:
        return connection.detach()
    # The connection stays open here until nothing is left: then the stub ends.
    os.waitpid(pid, 0)
    keeper.end_all(float(request["environ"]["LAUNCHER_STUB_GRACE"]))
    os._exit(0)


def keep(request: dict[str, Any], stub: int, kept: set[int]) -> tuple[list[str], dict[str, str]]:
    """Be the keeper; return in a fork that is to be the script, with its words and environment.

    `kept` are the descriptors that a script has in any case.
    """
    os.setsid()
    try:
        keeps = keeper.Keeper(fork_script, request["words"], request["environ"], stub)
    except OSError:  # the launcher is gone
        os._exit(1)
    try:
        keeps.loop()
    except Forked as forked:
        words, environ, descriptors = forked.args
    keeps.hang_up()
    for descriptor in _descriptors() - kept - {*descriptors[2:]}:
        os.close(descriptor)
    return words, environ


def fork_script(
    words: list[str], environ: dict[str, str], descriptors: list[int], ignored: list[int]
) -> int:
    """Start the script by a fork of the keeper, as Start has it."""
    pid: int = keeper.fork(descriptors, ignored)
    if pid == 0:
        raise Forked(words, environ, descriptors)
    return pid


def as_new(words: list[str], environ: dict[str, str]) -> None:
    """Make of this fork what a new process of that environment would be, as far as can be."""
    import torch

    threads = _before.get("OMP_NUM_THREADS")  # as torch read it
    environ = _with_changes(environ)
    os.environ.clear()
    os.environ.update(environ)
    # As Python has them, in a child of torchrun's.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    multiprocessing.current_process().authkey = os.urandom(32)
    torch.default_generator.seed()  # it was seeded at the import, for all forks alike
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen != threads and chosen.isdecimal() and int(chosen):
        torch.set_num_threads(int(chosen))  # OpenMP has read its own
    sys.path[:0] = [RUN] * IS_FIRST
    sys.argv[:] = [os.path.join(RUN, "rank.py"), *words]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [sys.executable, "-u", *sys.argv]


def _with_changes(environment: dict[str, str]) -> dict[str, str]:
    """Return a rank's environment with what imports have changed here, and would there, too."""
    changed: dict[str, str | None] = dict(environment)
    for name in {*_before, *os.environ}:
        before, after = _before.get(name), os.environ.get(name)
        if before != after and environment.get(name) == before:
            changed[name] = after
    return {name: text for name, text in changed.items() if text is not None}


def main() -> None:
    """Import torch; fork. In a script's fork: run it."""
    path, folder, *preload, number = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG of linux/prctl.h
    launcher = socket.socket(fileno=int(number))
    os.set_inheritable(launcher.fileno(), False)
    kept = _descriptors() - {launcher.fileno()}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without Python's traceback in the job's log
    if problem := why_unfit(folder, preload):
        for pid in keeper.below(os.getpid()):  # an import has started it
            keeper.send(pid, signal.SIGKILL)
        end(launcher, {"unfit": problem})
    gc.freeze()  # or each fork would copy all that at a collection, and at its end
    request, stub = serve(listener, launcher)
    as_new(*keep(request, stub, kept))
    rank.main()


if __name__ == "__main__":
    main()
