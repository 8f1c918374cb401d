"""Ranks without a launcher: forked from a process that has torch, whose import takes seconds.

For tests of what the training scripts compute and say; who starts them is in others.

    with Ranks() as ranks:
        done = ranks.run("train_ddp.py", "--epochs", "1", count=2)

`python ranks.py` is that process: it reads a job per line of JSON, and answers with one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

# What the scripts take long to import, or torch when they use it.
IMPORTED = ("torch._dynamo", "torchvision.transforms.v2", "matplotlib.pyplot")
HANGS = 100  # s until a rank that has not ended says where it is


class Done(NamedTuple):
    """What became of a job: the ranks' exit codes as a shell has them, all that they printed."""

    codes: list[int]
    out: str
    err: str


class Ranks:
    """Runs jobs, one at a time, in the current folder and with the current environment."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and what hangs of a job."""
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None
            with contextlib.suppress(OSError):  # a process that left the group still writes there
                self._folder.cleanup()

    def _start(self) -> subprocess.Popen[str]:
        # Not that of the test which starts it: torch would make it again when the test is over.
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        environment = {**os.environ, "TMPDIR": self._folder.name}
        environment["OMP_NUM_THREADS"] = "1"  # as torchrun has it; fit for a fork
        return subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: object, *args: object, count: int = 0, err: str = "", **env: str) -> Done:
        """Run a script as a job of `count` ranks; as one process without any of torchrun's: 0.

        err: a file for what it writes to stderr, if not one of our own.
        """
        out, own = Path("ranks.out"), Path("ranks.err")
        job = {
            "argv": [str(script), *map(str, args)],
            "count": count,
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **env},
            "folder": os.getcwd(),
            "files": [os.devnull, str(out.absolute()), err or str(own.absolute())],
        }
        for file in (out, own):
            file.write_bytes(b"")
        self._process = self._process or self._start()
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], 2 * HANGS)
            assert ready, f"a rank hangs:\n{own.read_text()}"
            codes = json.loads(self._process.stdout.readline())
        except BaseException:  # the test's time is up, too
            self.__exit__()
            raise
        return Done(codes, out.read_text(), own.read_text())


def serve() -> None:
    for module in IMPORTED:
        with contextlib.suppress(ImportError):  # what is not installed, a script may not need
            importlib.import_module(module)
    for line in sys.stdin:
        reader, writer = os.pipe()
        if os.fork() == 0:
            run_job(json.loads(line), writer)  # in place of torchrun
        os.close(writer)
        with open(reader) as file:
            print(file.read(), flush=True)
        os.wait()


def run_job(job: dict, answer: int) -> None:
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    codes: dict[int, int | None] = {}

    def tell(number: int) -> None:
        for pid, code in codes.items():
            if code is None:
                os.kill(pid, number)

    # As torchrun does: a stop is for all ranks, and a failure ends all.
    signal.signal(signal.SIGTERM, lambda number, _: tell(number))
    signal.signal(signal.SIGALRM, lambda *_: tell(signal.SIGKILL))
    store, port = start_store(answer) if job["count"] else (0, "")
    for rank in range(max(1, job["count"])):
        if job["count"]:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["count"]))
            os.environ.update(LOCAL_WORLD_SIZE=str(job["count"]))
        pid = os.fork()
        if pid == 0:
            os.close(answer)
            run_rank(job)
        codes[pid] = None
    while None in codes.values():
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        codes[pid] = code if code >= 0 else 128 - code
        if code:
            signal.alarm(60)
    if store:
        os.kill(store, signal.SIGKILL)
    os.write(answer, json.dumps(list(codes.values())).encode())
    os._exit(0)


def start_store(answer: int) -> tuple[int, str]:
    """Start the job's store as torchrun has it: rank 0 may end while others still use one.

    Its process forks nothing: its threads may hold locks.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(answer)
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        signal.pause()
    return pid, os.read(reader, 100).decode()


def run_rank(job: dict) -> None:
    """Run the script as Python does, and end as it does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, path in enumerate(job["files"]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    faulthandler.dump_traceback_later(HANGS)  # to stderr
    sys.argv = job["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
