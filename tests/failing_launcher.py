"""The real launcher with a mistake in it: failing_launcher.py once|always|look ARGUMENT ...

The step of its run's state machine raises when the ranks are known: once, or from then on always.
Or no look at what ranks have left behind succeeds, as where /proc is hidden.
"""

from __future__ import annotations

import sys
from typing import Any

del sys.path[0]  # this folder

from launcher.cli import main  # noqa: E402
from launcher.run import machine, supervisor  # noqa: E402
from launcher.run.events import RanksStarted  # noqa: E402
from launcher.system import System  # noqa: E402


def mistaken(plain: Any, *, always: bool) -> Any:
    """Return a step that raises."""
    raised = False

    def step(state: Any, event: Any, now: float) -> Any:
        nonlocal raised
        after = plain(state, event, now)
        if (isinstance(event, RanksStarted) and not raised) or (raised and always):
            raised = True
            raise KeyError("a mistake")
        return after

    return step


def blind(*_: Any) -> Any:
    """Look, and see nothing."""
    raise IndexError("no processes")


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what == "look":
        System.look = System.end_all = blind  # type: ignore[method-assign]
        supervisor._TO_END = 1.0
    else:
        machine.step = mistaken(machine.step, always=what == "always")
    sys.exit(main())
