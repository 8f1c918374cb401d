"""The real launcher, which writes what it hears to a file: real_launcher.py FILE ARGUMENT ..."""

from __future__ import annotations

import pickle
import sys
from typing import Any

del sys.path[0]  # this folder, which has a launcher.py of its own

from launcher.cli import main  # noqa: E402
from launcher.run import host  # noqa: E402


class Recorder:
    """Writes each event, and the phase after it; not what the two machines tell each other."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._depth = 0

    def around(self, plain: Any) -> Any:
        """Return a step of the state machines that is recorded."""

        def step(before: Any, event: Any, now: float) -> Any:
            self._depth += 1
            after, actions = plain(before, event, now)
            self._depth -= 1
            if self._depth == 0:
                pickle.dump((event, after.run.phase.value), self._file)
                self._file.flush()
            return after, actions

        return step


if __name__ == "__main__":
    path = sys.argv.pop(1)
    with open(path, "ab") as file:
        recorder = Recorder(file)
        host.step = recorder.around(host.step)
        host.hear = recorder.around(host.hear)
        exit_code = main()
    sys.exit(exit_code)
