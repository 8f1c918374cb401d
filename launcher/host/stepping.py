"""How a state machine is driven: `step(state, event, now)` decides, and what it decides is done.

An action may cause events, such as a command that follows from a report. So events queue: all
actions of a step are carried out before the next event, and no machine is stepped within a step.
"""

from __future__ import annotations

import collections
from typing import Any, Callable

from launcher.host.system import System
from launcher.text.log import described


class Stepping:
    """A state machine and its effects; a subclass carries out each action: `_do(action)`.

    With a `name`, steps are logged.
    """

    def __init__(
        self,
        system: System,
        state: Any,
        step: Callable[[Any, Any, float], tuple[Any, tuple[Any, ...]]],
        name: str,
    ) -> None:
        self.state = state
        self._system, self._step, self._name = system, step, name
        self._began = system.now()
        self._events = collections.deque[Any]()
        self._is_acting = False

    def happens(self, event: Any) -> None:
        """Handle an event, and carry out its actions, before the next event."""
        self._events.append(event)
        if not self._is_acting:
            self._act(())

    def _act(self, actions: tuple[Any, ...]) -> None:
        self._is_acting = True
        try:
            for action in actions:
                self._do(action)
            while self._events:
                for action in self._decide(self._events.popleft()):
                    self._do(action)
        finally:
            self._is_acting = False

    def _decide(self, event: Any) -> tuple[Any, ...]:
        before, now = self.state, self._system.now()
        self.state, actions = self._step(before, event, now)
        if self._name:
            line = described(self._name, before, event, self.state, actions, now - self._began)
            if line:
                self._system.log(line)
        return actions

    def _do(self, action: Any) -> None:
        raise NotImplementedError
