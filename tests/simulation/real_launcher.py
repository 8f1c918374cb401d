"""The real launcher, which writes what it hears to a file: real_launcher.py FILE ARGUMENT ..."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

# In place of this folder, which has a launcher.py of its own; the import takes it out again.
sys.path[0] = str(Path(__file__).parents[1])

from launcher.cli import main  # noqa: E402
from launcher.run import machine  # noqa: E402


def recorded(plain: Any, file: Any) -> Any:
    """Return the step of a run's state machine, which writes each event and the phase after it."""

    def step(before: Any, event: Any, now: float) -> Any:
        after, actions = plain(before, event, now)
        pickle.dump((event, type(after.phase).__name__), file)
        file.flush()
        return after, actions

    return step


if __name__ == "__main__":
    path = sys.argv.pop(1)
    with open(path, "ab") as file:
        machine.step = recorded(machine.step, file)
        exit_code = main()
    sys.exit(exit_code)
