"""The table of a state machine: what happens on which event in which phase. Pure.

A state is one value with a `phase`. A handler takes (state, event, now) and returns the next state
and the actions to carry out; the first line of its docstring says what happens.

    rules: Rules[State] = Rules()

    @rules.when(Phase.RUNNING, on=Stop, to=(Phase.STOPPING,))
    def _stop(state: State, event: Stop, now: float) -> Step:
        '''Pass the stop on to the ranks.'''
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Callable, Generic, NamedTuple, Protocol, TypeVar


class PhaseEnum(Enum):
    """The phases of one machine: `NAME = value, meaning, time_out`, as people read them.

    `time_out` is how long a phase lasts until the event Time is due; "" for as long as it takes.
    """

    meaning: str
    time_out: str

    def __new__(cls, value: str, meaning: str, time_out: str = "") -> PhaseEnum:
        """Return a phase: only its first word is the value."""
        phase = object.__new__(cls)
        phase._value_ = value
        phase.meaning = meaning
        phase.time_out = time_out
        return phase


class HasPhase(Protocol):
    """A state of a state machine."""

    @property
    def phase(self) -> Any:
        """Where the machine is: a member of an enum."""


State = TypeVar("State", bound=HasPhase)
Event = TypeVar("Event")
Handler = Callable[[State, Event, float], tuple[State, tuple[Any, ...]]]


class Rule(NamedTuple):
    """One row: what `handler` does with an event in some phases, and to which others it may lead.

    The phase may also stay as it is.
    """

    phases: tuple[Enum, ...]
    event: type
    to: tuple[Enum, ...]
    handler: Callable[..., Any]

    @property
    def says(self) -> str:
        """What happens, in one line."""
        return (self.handler.__doc__ or "").partition("\n")[0].strip()


class Rules(Generic[State]):
    """All rules of one machine; a pair of phase and event without a rule changes nothing.

    `table` has them by phase and event; tests plant mistakes into it.
    """

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self.table: dict[tuple[Enum, type], Rule] = {}

    def when(
        self, *phases: Enum, on: type[Event], to: Sequence[Enum] = ()
    ) -> Callable[[Handler[State, Event]], Handler[State, Event]]:
        """Have the function below act on an event in some phases; `to` is where that may lead."""

        def register(handler: Handler[State, Event]) -> Handler[State, Event]:
            rule = Rule(phases, on, tuple(to), handler)
            for phase in phases:
                if self.table.setdefault((phase, on), rule) is not rule:
                    raise ValueError(f"two rules for {on.__name__} in {phase.name}")
            self._rules.append(rule)
            return handler

        return register

    def rule(self, phase: Enum, event: type) -> Rule | None:
        """Return the rule for an event in a phase, if there is one."""
        return self.table.get((phase, event))

    def step(self, state: State, event: object, now: float) -> tuple[State, tuple[Any, ...]]:
        """Return the next state and the actions to carry out; `now` is a time.monotonic()."""
        rule = self.table.get((state.phase, type(event)))
        if rule is None:
            return state, ()
        after: tuple[State, tuple[Any, ...]] = rule.handler(state, event, now)
        return after

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)
