"""A process that has imported torch once for its host, and forks torchrun and its ranks from that.

Executed by path, with its socket to the launcher, the script's folder and the modules to import
besides torch. It starts when the plan is made, so that its imports overlap with joining, and lives
as long as the launcher, which it never outlives. It forks torchrun at the launcher's request, once
an attempt, and ranks at that torchrun's; both become the launcher's children, as cold ones are.

A fork is not a new Python: it is mended here as far as that can be (as_new). What would be shared,
or lost, is looked for first (why_unfit): then all starts are cold.
"""

from __future__ import annotations

import sys

BEFORE = frozenset(sys.modules)  # as a script finds them

# ruff: noqa: E402
import builtins
import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import os
import resource
import select
import signal
import socket
import threading
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

NURSERY = os.getpid()
HERE = os.path.dirname(os.path.abspath(__file__))
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # that a scheduler sends before a stop
_BUILTIN = types.BuiltinFunctionType
_FINDERS = ("BuiltinImporter", "FrozenImporter", "PathFinder")  # of Python itself
# Finders that .pth files install, whatever a sitecustomize does: setuptools' and virtualenv's.
_OF_PTH_FILES = ("_distutils_hack", "__editable__", "_virtualenv")
_MOST_DESCRIPTORS = 8  # with a request
_REPLY_SECONDS = 20.0  # for a rank to be forked, on a machine that is busy
_before: dict[str, str] = {}  # the environment, before all imports


class Request(NamedTuple):
    """What a fork is to be, and its descriptors: stdin, stdout, stderr of a rank."""

    message: dict[str, Any]
    descriptors: list[int]


class Fork(NamedTuple):
    """A fork with its request, and what rank.py's fork_for_launcher() returns in it."""

    request: Request
    forked: tuple[int, int]


def send(connection: socket.socket, message: dict[str, Any], descriptors: Iterable[int]) -> None:
    """Send a message with descriptors: its length, then JSON. Raises OSError."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "big")], list(descriptors))
    connection.sendall(data)


def receive(connection: socket.socket) -> Request | None:
    """Return the next message; None if the other end is gone."""
    length, descriptors, _, _ = socket.recv_fds(connection, 8, _MOST_DESCRIPTORS)
    data, missing = bytearray(), int.from_bytes(length, "big")
    while length and len(data) < missing:
        more = connection.recv(missing - len(data))
        if not more:
            return None
        data += more
    return Request(json.loads(data), list(descriptors)) if length else None


def reply(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a line; whoever is gone does not need it."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


# Whether forks can be as new processes are.


def why_unfit(folder: str, preload: Iterable[str]) -> str:
    """Import all; return why forks of this process would not be as new ones, "" if they are."""
    if hooks := _hooks():
        return f"{hooks} changes how Python imports modules"
    known, folder_before, handlers = _descriptors(), os.getcwd(), _handlers()
    _before.update(os.environ)
    for name in ("torch", "torch.distributed.run", *preload):
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
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # OpenBLAS ends its own at a fork
        return f"an import has started a thread ({threads} are running)"
    with contextlib.suppress(ChildProcessError):  # there is none
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "an import has started a process"
    return ""


def _hooks() -> str:
    """Return the name of a module of the site's that hooks imports: it may look at RANK."""
    own = next((one for one in ("sitecustomize", "usercustomize") if one in sys.modules), "")
    finders = {
        getattr(one, "__name__", type(one).__name__)
        for one in sys.meta_path
        if not getattr(one, "__module__", "").startswith(_OF_PTH_FILES)
    }
    is_hooked = finders - {*_FINDERS} or not isinstance(builtins.__import__, _BUILTIN)
    return own if own and is_hooked else ""


def _modules_in(folder: str) -> set[str]:
    """Return the names of the modules that a script finds in its folder."""
    with contextlib.suppress(OSError):
        names = os.listdir(folder or os.curdir)
        folders = {name for name in names if os.path.isdir(os.path.join(folder, name))}
        files = {name.partition(".")[0] for name in names if name.endswith((".py", ".pyc", ".so"))}
        return files | {
            name for name in folders if os.path.exists(os.path.join(folder, name, "__init__.py"))
        }
    return set()


def _is_in(folder: str, name: str) -> bool:
    """Tell whether a module that is loaded is the script's own: by PYTHONPATH, say."""
    file = getattr(sys.modules.get(name), "__file__", None)
    parts = os.path.realpath(folder or os.curdir), os.path.realpath(file or os.sep)
    return os.path.commonpath(parts) == parts[0]


def _descriptors() -> set[int]:
    listed = map(int, os.listdir("/proc/self/fd"))
    return {one for one in listed if _opened(one)}  # not that of the listing


def _opened(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def _handlers() -> dict[int, int]:
    """Return which signals have which handlers."""
    return {int(number): id(signal.getsignal(number)) for number in signal.valid_signals()}


def _problem_in_a_fork() -> str:
    """Return what is wrong in a fork, "" for nothing."""
    import torch

    problems = (
        "",
        "an import has initialized CUDA, which cannot be used after a fork",
        "an import has each fork start a thread",
    )
    pid = os.fork()
    if pid == 0:
        try:
            is_bad = getattr(torch._C, "_cuda_isInBadFork", bool)()
            os._exit(1 if is_bad else 2 * (len(os.listdir("/proc/self/task")) > 1))
        except BaseException:
            os._exit(3)
    status = os.waitpid(pid, 0)[1]
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 3
    return problems[code] if code < len(problems) else "a fork of it fails"


# Forks.


def serve(launcher: socket.socket, rank: types.ModuleType) -> Fork:
    """Fork for the launcher and for torchruns; return in a fork. Ends with the launcher."""
    torchruns: list[socket.socket] = []
    while True:
        for ready in select.select([launcher, *torchruns], [], [])[0]:
            request = _request_of(ready)
            if request is None and ready is launcher:
                os._exit(0)
            if request is None:
                torchruns.remove(ready)
                ready.close()
                continue
            ours = theirs = None
            if ready is launcher:  # a torchrun, with a connection of its own to us
                ours, theirs = socket.socketpair()
                request.descriptors.append(theirs.detach())
            fork, is_known = _fork(request, rank)
            if fork:
                for connection in (launcher, *torchruns, ours):
                    if connection:
                        connection.close()
                return fork
            for descriptor in request.descriptors:
                os.close(descriptor)
            if ours:
                torchruns.append(ours)
            reply(ready, {"forked": is_known})


def _request_of(connection: socket.socket) -> Request | None:
    with contextlib.suppress(OSError, ValueError):
        return receive(connection)
    return None


def _fork(request: Request, rank: types.ModuleType) -> tuple[Fork | None, bool]:
    """Return what the fork is, in it; here, whether the launcher knows it.

    There is a process in between, as at a cold start.
    """
    try:
        middle = os.fork()
        if middle == 0:
            return Fork(request, rank.fork_for_launcher()), False
    except OSError:  # no process or memory is left
        if os.getpid() != NURSERY:
            os._exit(1)
        return None, False
    return None, os.waitpid(middle, 0)[1] == 0


def as_new(message: dict[str, Any]) -> None:
    """Make of this fork what a new process of that environment would be, as far as can be."""
    import torch

    threads = _before.get("OMP_NUM_THREADS")  # as torch read it
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["folder"])
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    multiprocessing.current_process().authkey = os.urandom(32)
    torch.default_generator.seed()  # it was seeded at the import, for all forks alike
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen != threads and chosen.isdecimal() and int(chosen):
        torch.set_num_threads(int(chosen))  # OpenMP has read its own
    sys.argv[:] = message["argv"]
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


def be_rank(fork: Fork, rank: types.ModuleType) -> None:
    """Run the script as rank.py does."""
    message = fork.request.message
    for number, descriptor in enumerate(fork.request.descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.umask(message["umask"])
    # As torchrun's handlers leave it to what it executes.
    for caught in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(caught, signal.SIG_DFL)
    for warning in WARNINGS:
        if signal.getsignal(warning) is live_on:
            signal.signal(warning, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, limits in message["limits"]:
        if resource.getrlimit(number) != tuple(limits):
            resource.setrlimit(number, limits)
    as_new({**message, "environment": _with_changes(message["environment"])})
    rank.main(forked=fork.forked)


def be_torchrun(fork: Fork, agent: types.ModuleType) -> None:
    """Run torchrun as agent.py does, which has its ranks forked by the nursery."""
    as_new(fork.request.message)
    connection = socket.socket(fileno=fork.request.descriptors[0])
    os.set_inheritable(connection.fileno(), False)
    agent.start(Forks(connection, fork.forked[0]))


class Forks:
    """What a torchrun that was forked has its ranks forked by."""

    def __init__(self, connection: socket.socket, knows: int) -> None:
        self._connection, self._knows = connection, knows
        connection.settimeout(_REPLY_SECONDS)

    def known(self) -> None:
        """Have the launcher adopt this torchrun, which it knows now."""
        with contextlib.suppress(OSError):  # what waits for that was killed
            os.write(self._knows, b".")
        os.close(self._knows)

    def fork(self, argv: tuple[str, ...], environ: dict[str, str], files: list[Any]) -> str:
        """Have a rank forked, with torchrun's files of its output; return why it was not."""
        if argv[:2] != (sys.executable, "-u"):  # PYTHON_EXEC, or numactl of --numa-binding
            return f"they are run by {argv[0]}"
        limits = [
            (number, resource.getrlimit(number))
            for name, number in vars(resource).items()
            if name.startswith("RLIMIT_")
        ]
        os.umask(umask := os.umask(0o22))
        message = {
            "kind": "rank",
            "argv": argv[2:],
            "environment": environ,
            "umask": umask,
            "limits": limits,
        }
        descriptors = [0, *(file.fileno() if file else n for n, file in enumerate(files, 1))]
        try:
            send(self._connection, {**message, "folder": os.getcwd()}, descriptors)
            if json.loads(self._connection.makefile("rb").readline())["forked"]:
                return ""
        except socket.timeout:  # TimeoutError, from Python 3.10 on
            with contextlib.suppress(OSError):
                os.kill(NURSERY, signal.SIGKILL)  # or it goes on with this rank later
            return f"the process that forks them has not replied for {_REPLY_SECONDS:g} s"
        except (OSError, ValueError):
            pass
        return "the process that forks them has ended, or cannot fork"


def live_on(number: int, frame: object) -> None:
    """Do nothing at a signal that would else end this process."""


def load(name: str) -> types.ModuleType:
    """Return a file beside this one as a module that nobody can import."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Import torch; serve. In a fork: be torchrun, or a rank."""
    folder, *preload, number = sys.argv[1:]
    launcher = socket.socket(fileno=int(number))
    os.set_inheritable(launcher.fileno(), False)
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG of linux/prctl.h
    libc.prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: as in agent.py
    # Slurm may send an early warning to all processes of a step.
    for warning in WARNINGS:
        if signal.getsignal(warning) == signal.SIG_DFL:
            signal.signal(warning, live_on)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without Python's traceback in the job's log
    is_first = sys.path[:1] == [HERE]  # unless Python was told not to have it there
    sys.path[:] = sys.path[is_first:]  # our modules stand in for nobody's
    problem = why_unfit(folder, preload)
    reply(launcher, {"unfit": problem} if problem else {"ready": True})
    if problem:
        return
    agent, rank = load("agent"), load("rank")
    fork = serve(launcher, rank)
    if fork.request.message["kind"] == "rank":
        sys.path[:0] = [HERE] * is_first
        be_rank(fork, rank)
    else:
        be_torchrun(fork, agent)


if __name__ == "__main__":
    main()
