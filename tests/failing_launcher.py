"""The real launcher with a mistake in it: failing_launcher.py WHAT ARGUMENT ...

WHAT is `once`, `always`, `plan`, `begin` or `success`.

The step of its run's state machine raises when the ranks are known: once, or from then on always.
With `plan` and `begin` what raises is what happens before the hosts join; on a busy machine the
other host may be slow to ask the first one why. With `success` it comes when all ranks have
succeeded, and what they have left behind is being ended.
"""

from __future__ import annotations

import sys
from typing import Any

del sys.path[0]  # this folder

from launcher.cli import main  # noqa: E402
from launcher.job import prepare  # noqa: E402
from launcher.peers import coordinator  # noqa: E402
from launcher.run import machine, supervisor  # noqa: E402
from launcher.run.events import ThreadRaised  # noqa: E402
from launcher.run.state import Why  # noqa: E402


def mistaken(plain: Any, *, always: bool) -> Any:
    """Return a step that raises."""
    raised = False

    def step(state: Any, event: Any, now: float) -> Any:
        nonlocal raised
        after = plain(state, event, now)
        if (isinstance(event, ThreadRaised) and not raised) or (raised and always):
            raised = True
            raise KeyError("a mistake")
        return after

    return step


def mistake(*_: object, **__: object) -> Any:
    """Raise."""
    raise KeyError("a mistake")


if __name__ == "__main__":
    how = sys.argv.pop(1)
    if how == "plan":
        prepare.make_plan = mistake  # type: ignore[assignment]
    elif how == "begin":
        supervisor.Supervisor._begin_attempt = mistake  # type: ignore[method-assign]
        coordinator._LATE_HOSTS_SECONDS = 60.0
    elif how == "success":
        due = supervisor.Supervisor._do_what_is_due

        def mistaken_due(self: Any) -> None:
            """Raise once all ranks have succeeded."""
            if getattr(self.state.phase, "why", None) is Why.SUCCESS:
                mistake()
            due(self)

        supervisor.Supervisor._do_what_is_due = mistaken_due  # type: ignore[method-assign]
    else:
        machine.step = mistaken(machine.step, always=how == "always")
    sys.exit(main())
