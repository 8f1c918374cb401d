"""One host: a launcher in a session of its own, and all that runs below it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Callable

from launcher import run_dir
from launcher.archive import ARCHIVE, PACKAGE
from launcher.errors import EXIT_CANNOT_EXECUTE, LaunchError
from launcher.job.toolkit import BASE_DIR_VARIABLE
from launcher.processes import send, tie_to_this_process, tree
from launcher_tools.local_output import STDERR, STDOUT
from launcher_tools.local_shares import Share

if TYPE_CHECKING:
    import psutil

_LAUNCHER = ARCHIVE or os.path.join(PACKAGE, "__main__.py")


class Host:
    """Attributes: `number`, N of algo-N; `process`, its launcher, None until it starts.

    `drains` write its logs, until the last of its processes has ended.
    """

    def __init__(self, number: int, share: Share, environment: Mapping[str, str]) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.drains: list[subprocess.Popen[bytes]] = []
        self._share = share
        self._environment = environment

    @property
    def name(self) -> str:
        """The name that SageMaker would give it."""
        return f"algo-{self.number}"

    @property
    def runs(self) -> bool:
        """Whether its launcher has started and not ended."""
        return self.process is not None and self.process.returncode is None

    def log(self, stream: int) -> str:
        """Return the path of the file that holds what it writes to stdout or to stderr."""
        name = "stderr.log" if stream == STDERR else "stdout.log"
        return os.path.join(self._environment[BASE_DIR_VARIABLE], name)

    def start(self, words: Sequence[str]) -> None:
        """Start its launcher. Raises LaunchError."""
        try:
            with _on_cpus(self._share.cpus), self._drain(STDOUT) as out, self._drain(STDERR) as err:
                self.process = subprocess.Popen(
                    [sys.executable, _LAUNCHER, *words],
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    # Or else a terminal's Ctrl-C would reach it, and its ranks, without us.
                    start_new_session=True,
                    # SIGKILL leaves us no time to stop the job, and nobody else would.
                    preexec_fn=tie_to_this_process(),
                )
        except OSError as error:
            raise LaunchError(
                f"cannot start the launcher of {self.name}: {error.strerror}.",
                exit_code=EXIT_CANNOT_EXECUTE,
            ) from None

    def _drain(self, stream: int) -> IO[bytes]:
        """Return a pipe to its log, as on SageMaker: a file could be emptied (`> /dev/stdout`).

        What reads it lives as long as somebody writes, and takes all: nobody waits for a reader of
        our output, or needs us to live, or fails because the disk is full.
        """
        with open(self.log(stream), "ab") as log:
            drain = subprocess.Popen(
                ["sh", "-c", "cat || exec cat >/dev/null"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.drains.append(drain)
        assert drain.stdin
        return drain.stdin

    def stop(self) -> None:
        """Stop it as SageMaker would: SIGTERM to its launcher."""
        if self.process and self.runs:
            send(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all of its processes, none of which is to see another one die first."""
        if self.process and self.runs:
            kill_all(functools.partial(tree, self.process.pid))

    def tidy(self) -> None:
        """Remove what it could not remove itself, if it was killed."""
        if self.process and self.process.returncode and self.process.returncode < 0:
            run_dir.remove_left(self.process.pid, self._environment)


@contextlib.contextmanager
def _on_cpus(cpus: frozenset[int]) -> Iterator[None]:
    """Have children that are started here inherit an affinity mask."""
    if sys.platform != "linux" or not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def kill_all(find: Callable[[], Sequence[psutil.Process]]) -> None:
    """Kill all processes that are found: first hold each, so that it starts no other."""
    held: dict[int, psutil.Process] = {}
    found = True
    while found:
        new = {process.pid: process for process in find() if process.pid not in held}
        for process in new.values():
            send(process, signal.SIGSTOP)
        held.update(new)
        found = bool(new)
    for process in held.values():
        send(process, signal.SIGKILL)
