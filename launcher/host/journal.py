"""DIR/HOST/events.jsonl: what this launcher records about its job (text/words.py, `Note`)."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from typing import Callable

from launcher.text.background import Writer
from launcher.text.words import Note, shortened

NAME = "events.jsonl"
_LONGEST_CAUSE = 600  # characters


def host_folder(folder: str, host: str) -> str:
    """Return DIR/HOST, the folder for a host's events and its ranks' output."""
    return os.path.join(folder, host.replace("/", "_"))


class Journal(Writer):
    """The file, to which a thread appends each line at once.

    Its errors never cost the job: the folder may be on another machine, and hang.
    """

    def __init__(self, folder: str, host: str, began: float, log: Callable[[str], None]) -> None:
        super().__init__(self._append)
        self._host, self._began, self._log = host, began, log
        self._path = os.path.join(host_folder(folder, host), NAME)
        self._is_off = not folder  # also after an error

    def note(self, note: Note, attempt: int, now: float) -> None:
        """Write a line about something that happens now, in an attempt."""
        if self._is_off:
            return
        utc = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        cause = note.cause.partition("\n")[0].removeprefix("launcher: ")
        fields = {
            "utc": utc.replace("+00:00", "Z"),
            "seconds": round(now - self._began, 3),
            "attempt": attempt,
            **note._asdict(),
            "host": note.host or self._host,
            "cause": shortened(cause, _LONGEST_CAUSE),
            "since": None if note.since is None else round(note.since - self._began, 3),
        }
        absent = {name for name, value in fields.items() if value in (None, "", ())} - {"rank"}
        line = {name: value for name, value in fields.items() if name not in absent}
        self.add((json.dumps(line) + "\n").encode())

    def _append(self, line: bytes) -> None:
        if self._is_off:
            return
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with open(self._path, "a+b") as file:
                if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    file.write(b"\n")  # after a line that a full disk has cut off
                file.write(line)
        except Exception as error:  # a full disk, a read-only folder, our own bug
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._log(f"cannot write {self._path} ({why}); the job continues without it.")
            self._is_off = True
