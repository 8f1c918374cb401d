"""DIR/HOST/attempt-N/rank-R.log: what each rank of this host writes, and its copy."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping, Sequence

from launcher.host.archive import PACKAGE
from launcher.host.console import Console
from launcher.host.journal import host_folder
from launcher.host.system import System
from launcher.job.options import JOB_MARK
from launcher.text.log import in_order
from launcher.text.words import flag

COPIER = os.path.join(PACKAGE, "run", "copier.py")
_TAIL_BYTES = 1 << 16  # C++ adds its stack to what it says


class RankLogs:
    """The files of this host, if somebody wants them (`folder` is not ""), and who copies them.

    agent.py opens them as ranks' stdout and stderr. Ranks never wait for a reader: the console may
    be behind, or cut at the end, but the files are whole.
    """

    def __init__(self, system: System, log_dir: str, host: str, *, has_prefix: bool) -> None:
        self._system, self._has_prefix = system, has_prefix
        self._host_folder = host_folder(os.path.abspath(log_dir), host) if log_dir else ""
        self.folder = ""  # of this attempt
        self._begins: dict[int, int] = {}  # of ranks: how long their files were before
        self._console: Console | None = None
        self._has_begun = False

    def begin(self, attempt: int) -> None:
        """Begin an attempt."""
        if self._host_folder:
            self.folder = os.path.join(self._host_folder, f"attempt-{attempt}")

    def start(self, argv: Sequence[str], environ: Mapping[str, str], mark: tuple[str, str]) -> None:
        """Start what copies, once for all attempts; `argv` is its Python and its file."""
        if not self.folder or self._has_begun:
            return
        self._has_begun = True
        how = "prefix" if self._has_prefix else "plain"
        python, copier = argv
        environ = {name: value for name, value in environ.items() if name != JOB_MARK}
        words = [python, "-I", "-S", copier, how]
        try:
            self._console = self._system.start_console(words, environ, mark)
        except (OSError, subprocess.SubprocessError) as error:
            why = getattr(error, "strerror", None) or error
            self._system.log(f"the ranks' output is only in {self._host_folder} ({why}).")
            return
        if self._console:
            in_order(self._console.sync)

    def follow(self, ranks: Sequence[int]) -> None:
        """Have what these write from now on copied; they have not been started yet."""
        if not self.folder:
            return
        self._begins = {rank: _size(self._path(rank)) for rank in ranks}
        if self._console:
            self._console.follow([(r, self._path(r), at) for r, at in self._begins.items()])

    def _path(self, rank: int) -> str:
        return os.path.join(self.folder, f"rank-{rank}.log")

    def last_lines(self, rank: int) -> str:
        """Return the end of what a rank has written in this attempt, "" if that is not known."""
        begin = self._begins.get(rank)
        if begin is None:
            return ""
        try:
            file = os.open(self._path(rank), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            seen = os.fstat(file)
            start = max(begin, seen.st_size - _TAIL_BYTES)
            data = os.pread(file, _TAIL_BYTES, start) if stat.S_ISREG(seen.st_mode) else b""
            return data.decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(file)

    def has_ended(self, pid: int) -> bool:
        """Take note of a process that was reaped; tell whether it was the one that copies."""
        if self._console is None or pid != self._console.pid:
            return False
        self._forget(self._console)
        self._system.log(
            "the process that copies the ranks' output has ended; the rest is in "
            f"{self._host_folder}."
        )
        return True

    def close(self) -> None:
        """Have the last lines copied, within a bounded time; lines of ours come behind them."""
        if self._console:
            if not self._console.end():
                where = f"all of it is in {self._host_folder} ({flag('log_dir')})"
                self._system.log(f"the console did not take all of the ranks' output; {where}.")
            self._forget(self._console)

    def _forget(self, console: Console) -> None:
        in_order(None)
        console.close()
        self._console = None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
