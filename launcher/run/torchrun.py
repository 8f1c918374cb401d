"""This host's torchrun: its process, its stderr, and its own explanation of its end.

Its stdout is the launcher's. A thread copies its stderr, of which the launcher needs the last line:
torchrun reports errors in arguments nowhere else. Its exceptions are in an error file
(torch.distributed.elastic.multiprocessing.errors.record).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.host.processes import adopt_orphans, start_tied
from launcher.host.system import System
from launcher.result import causes
from launcher.text import log

ERROR_FILE = "torchrun.json"
_FULL_SECONDS = 0.1  # until more of its stderr is read, if nothing reads ours
_COPY_SECONDS = 0.5  # until its last words are copied
_PIECE = 1 << 16  # bytes that are read at once; a longer line is cut
_OF_ARGPARSE = re.compile(r"^\S+: error: ")
_OF_CHILDREN = "ChildFailedError"  # the launcher knows more of a rank whose keeper has joined
_KILLED = re.compile(
    r"Root Cause.*(Signal \d+ \(SIG(?!TERM|INT|HUP|QUIT)\w+\) received by PID \d+)"
)


class Torchrun:
    """A torchrun, or a program that runs it. Raises LaunchError if it cannot be started."""

    def __init__(
        self,
        system: System,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        run_dir: str,
    ) -> None:
        self._error_file, self._last_line = os.path.join(run_dir, ERROR_FILE), b""
        self._stderr, stderr = os.pipe()
        status = os.fstat(stderr)
        environ = {
            **environ,
            "LAUNCHER_STDERR": f"{status.st_dev}:{status.st_ino}",
            "TORCHELASTIC_ERROR_FILE": self._error_file,
        }
        try:
            self._copier = system.start_thread(self._copy)
            adopt_orphans()
            self.pid = start_tied(argv, environ, folder=folder, stderr=stderr)
        finally:
            os.close(stderr)

    def _copy(self) -> None:
        """Copy its stderr into ours, in pieces of whole lines; wait while nobody reads ours."""
        rest = b""
        with open(self._stderr, "rb", buffering=0) as stderr:
            while data := stderr.read(_PIECE):
                lines, newline, rest = (rest + data).rpartition(b"\n")
                if len(rest) > _PIECE:  # a line without an end
                    lines, newline, rest = rest, b"", b""
                self._relay(lines + newline)
        self._relay(rest)

    def _relay(self, text: bytes) -> None:
        while text and not log.relay(text):
            time.sleep(_FULL_SECONDS)
        lines = [line for line in text.splitlines() if line.strip()]
        self._last_line = lines[-1] if lines else self._last_line

    def words(self) -> str:
        """Return why it has ended, in its own words."""
        self.drain()
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            open(self._error_file, encoding="utf-8", errors="replace") as file,
        ):
            return _words_of(json.load(file)["message"])
        line = self._last_line.decode(errors="replace").strip()
        return _OF_ARGPARSE.sub("", line).strip("=")  # the line below a report of its children

    def drain(self) -> None:
        """Wait a moment for the end of its stderr, which its processes may still hold open."""
        self._copier.join(_COPY_SECONDS)


def _words_of(message: Any) -> str:
    """Return torchrun's exception, with its origin, in one line."""
    if isinstance(message, str):
        return message
    title = " ".join(str(message["message"]).split()).rstrip(" :")
    if title.startswith(_OF_CHILDREN):
        killed = _KILLED.search(title)
        return f"{killed[1]}, which it had started" if killed else ""
    links = causes.expanded([causes.Link("", str(message["extraInfo"]["py_callstack"]))])
    titles = [link.title() for link in links if link.exception]
    origins = [each for each in titles if not each.endswith(title)]  # some have the module's name
    return f"{title} ({origins[0]})" if origins else title
