"""Ways to plant a mistake into the state machines, for as long as a test runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable

from launcher.rules import Rule
from launcher.run.events import Answer


class Planter:
    """Plants a mistake, and takes it out again."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def drop(self, rules: Any, event: type, *phases: Any) -> None:
        """Have nothing happen on an event in some phases."""
        for phase in phases:
            rule = rules.table.pop((phase, event))
            self._stack.callback(rules.table.__setitem__, (phase, event), rule)

    def rule(self, rules: Any, phase: Any, event: type, handler: Callable[..., Any]) -> None:
        """Put another rule in the place of one, or where there is none."""
        key = (phase, event)
        old = rules.table.get(key)
        rules.table[key] = Rule((phase,), event, tuple(type(phase)), handler)
        if old:
            self._stack.callback(rules.table.__setitem__, key, old)
        else:
            self._stack.callback(rules.table.pop, key)

    def copy(self, rules: Any, event: type, phase: Any, like: Any) -> None:
        """Do on an event in a phase what is done on it in another."""
        self.rule(rules, phase, event, rules.table[like, event].handler)

    def after(self, rules: Any, event: type, change: Callable[..., Any], *phases: Any) -> None:
        """Change what is done: change(state, actions, now) gives another state and actions."""
        for phase in phases:
            plain = rules.table[phase, event].handler

            def handler(before: Any, event: Any, now: float, plain: Any = plain) -> Any:
                return change(*plain(before, event, now), now)

            self.rule(rules, phase, event, handler)

    def set(self, where: Any, name: str, value: Any) -> None:
        """Put something else in the place of a constant, a function, or a builtin of a module."""
        if name in vars(where):
            self._stack.callback(setattr, where, name, vars(where)[name])
        else:
            self._stack.callback(delattr, where, name)
        setattr(where, name, value)


@contextlib.contextmanager
def planted(plant: Callable[[Planter], None]) -> Iterator[None]:
    """Plant a mistake, and take it out again."""
    with contextlib.ExitStack() as stack:
        plant(Planter(stack))
        yield


# What may be changed after a rule has done its work.


def without(kind: type) -> Callable[..., Any]:
    """Lose the actions of a kind."""

    def change(state: Any, actions: Any, now: float) -> Any:
        return state, tuple(action for action in actions if not isinstance(action, kind))

    return change


def with_changes(**changes: Callable[[Any, float], Any]) -> Callable[..., Any]:
    """Change fields of the state."""

    def change(state: Any, actions: Any, now: float) -> Any:
        made = {name: value(state, now) for name, value in changes.items()}
        return state._replace(**made), actions

    return change


def answers(timeout: float) -> Callable[..., Any]:
    """Answer torchrun with another time-out."""

    def change(state: Any, actions: Any, now: float) -> Any:
        changed = (Answer(timeout) if isinstance(one, Answer) else one for one in actions)
        return state, tuple(changed)

    return change


Plant = Callable[[Planter], None]
MISTAKES: dict[str, Plant] = {}


def mistake(what: str) -> Callable[[Plant], Plant]:
    """Name what the function below plants."""

    def register(plant: Plant) -> Plant:
        MISTAKES[what] = plant
        return plant

    return register


from launcher.peers import first as _first  # noqa: E402
from launcher.peers import other as _other  # noqa: E402
from launcher.run import machine as _machine  # noqa: E402

RULES = (_first.RULES, _other.RULES, _machine.RULES)  # all registered, whatever runs before
