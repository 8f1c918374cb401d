"""Imports torch once for its host, and forks the ranks' keepers, whose scripts are forks, too.

Executed by path with the path of its socket, the script's folder, modules to import besides torch,
and the descriptor of its socket to the launcher. It starts when the plan is made, so that its
imports overlap with joining; stubs connect to it (stub.py). It ends with the launcher, which
ends it once all keepers are there.

    stub             torchrun's child, waits for the keeper's exit code
    warm.py
     └─ keeper       run/keeper.py, as in a fork of the stub
         └─ script   a fork of the keeper

A fork is not a new Python: as_new repairs it as far as possible. why_unfit checks first for state
that forks would share or lose: then all starts are cold.
"""

from __future__ import annotations

import sys

BEFORE = frozenset(sys.modules)  # as a script finds them

# ruff: noqa: E402
import contextlib
import gc
import importlib.machinery
import json
import multiprocessing
import os
import select
import signal
import socket
import threading
from pathlib import Path
from typing import NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
RUN = os.path.join(os.path.dirname(HERE), "run")
# Our modules must not hide others, nor may this folder stay in sys.path. If Python was told to
# leave a script's folder out of it, the ranks' is left out, too.
IS_FIRST = sys.path[:1] == [os.path.dirname(os.path.realpath(__file__))]
sys.path[:IS_FIRST] = [RUN, HERE]
import keeper  # type: ignore[import-not-found]
import rank  # type: ignore[import-not-found]
import stub  # type: ignore[import-not-found]

del sys.path[:2]
for name in {*sys.modules} - BEFORE:
    if os.path.dirname(getattr(sys.modules[name], "__file__", None) or "") in (RUN, HERE):
        del sys.modules[name]
_before = dict(os.environ)  # before the imports


# Whether forks can be like new processes.


def why_unfit(folder: str, preload: list[str]) -> str:
    """Import all; return why forks would differ from new processes, "" if they would not."""
    before = _state()
    for name in ("torch", "torch.distributed", *preload):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            return f"importing {name} failed with {type(error).__name__}: {error}"
    mine = {name.partition(".")[0] for name in set(sys.modules) - BEFORE}
    if hidden := sorted(name for name in mine if _hides_another(name, folder)):
        return f"{hidden[0]} is loaded, and would hide the {hidden[0]} in {folder}"
    if problem := _problem_in_a_fork():  # first: OpenBLAS ends its threads at a fork
        return problem
    for done, after in _state().items():
        if new := sorted(after - before[done]):
            return f"an import has {done} {new[0]}"
    return ""


def _state() -> dict[str, set[str]]:
    """Return what forks would share or lose, by what imports may have done."""
    signals = signal.valid_signals()
    return {
        "opened": {f"{name} ({number})" for number, name in _opened().items()},
        "changed the current folder to": {os.getcwd()},
        "set a handler for": {f"signal {int(one)}, {signal.getsignal(one)}" for one in signals},
        "started a thread": {f"({number})" for number in os.listdir("/proc/self/task")},
        "started a process": {f"({pid})" for pid in keeper.below(os.getpid())},
    }


def _hides_another(name: str, folder: str) -> bool:
    """Tell whether a loaded module would hide another one of its name, in the script's folder."""
    spec = importlib.machinery.PathFinder.find_spec(name, [folder or os.getcwd()])
    file = getattr(sys.modules.get(name), "__file__", None)
    if spec is None or spec.origin is None:  # there is none, or only a folder
        return False
    return os.path.realpath(file or "") != os.path.realpath(spec.origin)


def _opened() -> dict[int, str]:
    """Return what this process has open, by descriptors."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _problem_in_a_fork() -> str:
    """Return what goes wrong in a fork, "" for nothing."""
    import torch

    problems = {
        0: "",
        1: "an import has initialized CUDA, which cannot be used after a fork",
        2: "an import has each fork start a thread",
    }
    if (pid := os.fork()) == 0:
        with contextlib.suppress(Exception):
            is_bad = getattr(torch._C, "_cuda_isInBadFork", bool)()
            os._exit(1 if is_bad else 2 * (len(os.listdir("/proc/self/task")) > 1))
        os._exit(3)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return problems.get(exit_code, "a fork of it fails")


# Forks.


def serve(
    listener: socket.socket, launcher: socket.socket
) -> tuple[list[str], dict[str, str], int]:
    """Fork a keeper for each stub; return in it what as_stub returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps all that it forks
    while True:
        if launcher in select.select([listener, launcher], [], [])[0]:  # it never sends anything
            os._exit(0)
        connection = listener.accept()[0]
        if (policy := _memory_policy(_peer(connection))) != _memory_policy(os.getpid()):
            end(launcher, f"the memory of ranks has the policy {policy}")
        with contextlib.suppress(OSError):  # no process is left: the stub forks its keeper itself
            if os.fork() == 0:
                with listener, launcher:
                    try:
                        return as_stub(connection)
                    except (OSError, ValueError) as error:
                        end(launcher, f"a keeper cannot be forked ({error})")
        connection.close()


def as_stub(connection: socket.socket) -> tuple[list[str], dict[str, str], int]:
    """Become like a stub; return its words, its environment, and the socket to it."""
    pid = _peer(connection)
    words, environ = (
        [os.fsdecode(word) for word in Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")[:-1]]
        for name in ("cmdline", "environ")
    )
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    for number, descriptor in enumerate(socket.recv_fds(connection, 1, 3)[1]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    connection.sendall(stub.FORKED)
    del words[: words.index("-S") + 2]  # python -I -S stub.py
    return words, dict(text.split("=", 1) for text in environ), connection.detach()


def _peer(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED)  # the pid of struct ucred


def _memory_policy(pid: int) -> str:
    """Return a process's policy for memory (numactl), usually "default": see numa(7)."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/numa_maps") as file:
        return file.readline().split()[1]
    return "default"


def end(launcher: socket.socket, why: str) -> NoReturn:
    """Tell the launcher why no more keepers are forked, and end this process."""
    with contextlib.suppress(OSError):  # the launcher is gone
        launcher.sendall(json.dumps({"why": why}).encode() + b"\n")
    os._exit(0)


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
    sys.path[:0] = [os.path.dirname(os.path.realpath(rank.__file__))] * IS_FIRST
    sys.argv[:] = [os.path.join(RUN, "rank.py"), *words]
    if hasattr(sys, "orig_argv"):  # Python 3.10
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
    keeper.prctl(keeper.PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = socket.socket(fileno=int(number))
    os.set_inheritable(launcher.fileno(), False)
    inherited = _opened().keys() - {launcher.fileno()}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without Python's traceback in the job's log
    if problem := why_unfit(folder, preload):
        for pid in keeper.below(os.getpid()):  # an import has started it
            keeper.send(pid, signal.SIGKILL)
        end(launcher, problem)
    gc.freeze()  # or each fork would copy all that at a collection, and at its end
    words, environ, tells = serve(listener, launcher)
    environ, says = keeper.keep(environ, tells)
    for descriptor in _opened().keys() - inherited - {says}:
        os.close(descriptor)
    as_new(words, environ)
    rank.main()


if __name__ == "__main__":
    main()
