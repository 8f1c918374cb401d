"""Converts messages to JSON and back, by the types of their fields. Pure.

    class Stop(NamedTuple):
        number: int

    read(Stop, {"number": 15}) == Stop(15)

A message is a NamedTuple. Its fields may be NamedTuples, enums, tuples, and JSON's own types. A
NamedTuple with a method `short` is written as the list of its first fields; the others get their
defaults. Texts are cut, and made printable, where they are shown.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Mapping
from typing import Any, get_args, get_origin, get_type_hints


def written(value: Any) -> Any:
    """Return a message, or one of its values, as a value for JSON."""
    if isinstance(value, enum.Enum):
        return value.name
    if not isinstance(value, tuple):
        return value
    if hasattr(value, "short"):
        return value.short()
    if hasattr(value, "_fields"):
        return {name: written(part) for name, part in zip(value._fields, value)}
    return [written(part) for part in value]


def read(kind: Any, value: Any) -> Any:
    """Return a value from JSON as an object of a kind: a class, or the type of a field.

    Raises ValueError if it is not valid. Unknown fields are ignored.
    """
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple(get_args(kind), _of(list, value))
    if origin is Mapping:
        return _of(dict, value)
    if kind is float:
        return float(value if type(value) is int else _of(float, value))
    if kind in (bool, int, str):
        return _of(kind, value)
    if issubclass(kind, enum.Enum):
        return kind[_one_of(kind.__members__, _of(str, value))]
    if hasattr(kind, "short") and isinstance(value, list):
        value = {**kind._field_defaults, **dict(zip(kind._fields, value))}
    fields, hints = _of(dict, value), _hints(kind)
    return kind(*(read(hint, fields[_one_of(fields, name)]) for name, hint in hints.items()))


def _tuple(kinds: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        return tuple(read(kinds[0], value) for value in values)
    if len(values) != len(kinds):
        raise ValueError(len(values))
    return tuple(map(read, kinds, values))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:  # True is an int, too
        raise ValueError(value)
    return value


def _one_of(names: Collection[str], name: str) -> str:
    if name not in names:
        raise ValueError(name)
    return name


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)
