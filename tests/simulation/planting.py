"""Ways to plant a mistake into the launcher, for as long as a test runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable

from launcher.job.job import Job

Plant = Callable[["Planter"], None]
MISTAKES: dict[str, Plant] = {}
TABLES = ("EVENTS", "MESSAGES", "COMMANDS")  # of functions, of a state machine


def mistake(what: str) -> Callable[[Plant], Plant]:
    """Name what the function below plants."""

    def register(plant: Plant) -> Plant:
        MISTAKES[what] = plant
        return plant

    return register


class Planter:
    """Plants a mistake, and takes it out again."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def set(self, where: Any, name: str, value: Any) -> None:
        """Put something else in the place of a constant, a function, or a builtin of a module.

        The tables of a module that have the function get it as well.
        """
        plain = vars(where).get(name)
        if name in vars(where):
            self._stack.callback(setattr, where, name, plain)
        else:
            self._stack.callback(delattr, where, name)
        setattr(where, name, value)
        for table in TABLES:
            events = getattr(where, table, {})
            for event in [event for event, function in events.items() if function is plain]:
                self._stack.callback(events.__setitem__, event, plain)
                events[event] = value
        if plain in getattr(where, "PARTS", ()):
            parts = where.PARTS
            self._stack.callback(setattr, where, "PARTS", parts)
            where.PARTS = tuple(value if part is plain else part for part in parts)

    def around(self, where: Any, name: str, change: Callable[..., Any]) -> None:
        """Have change(plain, *arguments) called in place of a function."""
        plain = vars(where)[name]
        self.set(where, name, lambda *given, **named: change(plain, *given, **named))

    def nothing(self, where: Any, name: str) -> None:
        """Have a function of a state machine do nothing."""
        self.set(where, name, lambda state, *_, **__: (state, ()))


def with_options(job: Job, **options: Any) -> Job:
    """Return a job that has other options."""
    return job._replace(options=job.options._replace(**options))


def in_part(plant: Planter, name: str, change: Callable[..., Any]) -> None:
    """Have a part of run/ending.py decide by another state, and act on the one that there is."""

    def changed(plain: Any, state: Any, given: Any) -> Any:
        part = change(plain, state, given)
        if part is None:
            return None

        def act(now: float) -> Any:
            after, actions = part.act(now)
            return after._replace(job=state.job), actions

        return part._replace(act=act)

    plant.around(ending, name, changed)


@contextlib.contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Plant a mistake, and take it out again."""
    with contextlib.ExitStack() as stack:
        plant(Planter(stack))
        yield


def without(kind: type, actions: Any) -> tuple[Any, ...]:
    """Return actions but those of a kind, or that tell one of that kind."""
    return tuple(
        one
        for one in actions
        if not isinstance(one, kind) and not isinstance(getattr(one, "message", None), kind)
    )
