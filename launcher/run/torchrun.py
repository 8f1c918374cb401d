"""This host's torchrun: its process, its stderr, and its own explanation of its end.

Its stdout is the launcher's. Its stderr comes through the launcher, which needs the last line:
torchrun reports errors in arguments nowhere else. Its exceptions are in an error file
(torch.distributed.elastic.multiprocessing.errors.record).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.host.processes import adopt_orphans, start_tied
from launcher.host.system import System
from launcher.result import raised
from launcher.text import log

ERROR_FILE = "torchrun.json"
_FULL_SECONDS = 0.1  # until more of its stderr is read, if nothing reads ours
_OF_ARGPARSE = re.compile(r"^\S+: error: ")
_OF_CHILDREN = "ChildFailedError"  # the launcher knows more about it


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
        self._system = system
        self._error_file = os.path.join(run_dir, ERROR_FILE)
        self._stderr, stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        self._rest = self._last_line = b""
        self.due = float("inf")  # when its stderr is read again
        status = os.fstat(stderr)
        environ = {
            **environ,
            "LAUNCHER_STDERR": f"{status.st_dev}:{status.st_ino}",
            "TORCHELASTIC_ERROR_FILE": self._error_file,
        }
        try:
            adopt_orphans()
            self.pid = start_tied(argv, environ, folder=folder, stderr=stderr)
        finally:
            os.close(stderr)
        self.tick()

    def tick(self) -> None:
        """Read its stderr from now on."""
        self.due = float("inf")
        self._system.selector.register(self._stderr, selectors.EVENT_READ, self._read)

    def _pause(self) -> None:
        with contextlib.suppress(KeyError):  # it is paused already, or the selector is closed
            self._system.selector.unregister(self._stderr)

    def _read(self) -> bool:
        """Read its stderr; return whether there may be more."""
        if not log.relay(b""):  # ours has no reader
            self._pause()
            self.due = self._system.now() + _FULL_SECONDS
            return False
        try:
            data = os.read(self._stderr, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._pause()
        text = self._rest + data
        end = text.rfind(b"\n") + 1 if data else len(text)
        self._rest = text[end:][-(1 << 16) :]
        log.relay(text[:end])
        lines = [line for line in text[:end].splitlines() if line.strip()]
        self._last_line = lines[-1] if lines else self._last_line
        return bool(data)

    def words(self) -> str:
        """Return why it has ended, in its own words."""
        while self._read():
            pass
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            open(self._error_file, encoding="utf-8", errors="replace") as file,
        ):
            return _words_of(json.load(file)["message"])
        line = self._last_line.decode(errors="replace").strip()
        return _OF_ARGPARSE.sub("", line).strip("=")  # the line below a report of its children

    def close(self) -> None:
        """Close its stderr."""
        self._pause()
        with contextlib.suppress(OSError):
            os.close(self._stderr)


def _words_of(message: Any) -> str:
    """Return torchrun's exception, with its origin, in one line."""
    if isinstance(message, str):
        return message
    title = str(message["message"])
    if title.startswith(_OF_CHILDREN):
        return ""
    links = raised.read([raised.Link("", str(message["extraInfo"]["py_callstack"]))])
    origins = [link.title() for link in links if link.exception and link.title() != title]
    return f"{title} ({origins[0]})" if origins else title
