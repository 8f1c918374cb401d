"""How a state machine is driven: `step(state, event, now)` decides, and what it decides is done.

An action may cause events, such as a command that follows from a report. So events queue: all
actions of a step are carried out before the next event, and no machine is stepped within a step.
"""

from __future__ import annotations

import collections
from typing import Any, Callable

from launcher.host.system import System
from launcher.text.words import Log, Note, shortened

_CHARACTERS = 320  # of an event, or of an action, that --launcher-verbose shows


class Stepping:
    """A state machine and its effects; a subclass carries out each action: `_do(action)`.

    Lines are logged here, and notes are passed to note(note).

    With a `name`, steps are logged: "3.214 s: run Running to Ending on End(number=1, ...):
    EndRanks(...)", where 3.214 s have passed since the launcher's start.
    """

    def __init__(
        self,
        system: System,
        state: Any,
        step: Callable[[Any, Any, float], tuple[Any, tuple[Any, ...]]],
        note: Callable[[Note], None],
        name: str,
    ) -> None:
        self.state = state
        self._system, self._step, self._note, self._name = system, step, note, name
        self._began = system.now()
        self._events = collections.deque[Any]()
        self._is_acting = False

    def happens(self, event: Any) -> None:
        """Handle an event, and carry out its actions, before the next event."""
        self._events.append(event)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._events:
                self._do_all(self._decide(self._events.popleft()))
        finally:
            self._is_acting = False

    def _do_all(self, actions: tuple[Any, ...]) -> None:
        for action in actions:
            if isinstance(action, Log):
                self._system.log(action.line)
            elif isinstance(action, Note):
                self._note(action)
            else:
                self._do(action)

    def _decide(self, event: Any) -> tuple[Any, ...]:
        before, now = self.state, self._system.now()
        self.state, actions = self._step(before, event, now)
        if self._name and (actions or before != self.state):
            was, phase = type(before.phase).__name__, type(self.state.phase).__name__
            to = "" if was == phase else f" to {phase}"
            seen = [event, *(each for each in actions if not isinstance(each, (Log, Note)))]
            on, *does = (shortened(repr(each), _CHARACTERS) for each in seen)
            line = ": ".join(filter(None, [f"{self._name} {was}{to} on {on}", ", ".join(does)]))
            self._system.log(f"{now - self._began:.3f} s: {line}")
        return actions

    def _do(self, action: Any) -> None:
        raise NotImplementedError
