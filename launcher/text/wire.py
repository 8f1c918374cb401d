"""Reads messages from JSON, by the types of their fields. Pure.

    class Stop(NamedTuple):
        number: int

    read(Stop, [15]) == read(Stop, {"number": 15}) == Stop(15)

A message is a NamedTuple. Its fields may be NamedTuples, numbered enums, tuples, and JSON's own
types. Python's json writes all of these as lists and numbers. Fields at the end that have defaults
may be absent. Texts are cut, and made printable, where they are shown.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints


def read(kind: Any, value: Any) -> Any:
    """Return a value from JSON as an object of a kind: a class, or the type of a field.

    Raises ValueError if it is not valid. Unknown fields are ignored.
    """
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple(get_args(kind), _of(list, value))
    if origin is Union:  # with None
        return None if value is None else read(get_args(kind)[0], value)
    if origin is Mapping:
        return _of(dict, value)
    if kind is float:
        return float(value if type(value) is int else _of(float, value))
    if kind in (bool, int, str, dict):
        return _of(kind, value)
    if issubclass(kind, enum.Enum):
        return kind(_of(int, value))
    hints = _hints(kind)
    given = dict(zip(hints, value)) if isinstance(value, list) else _of(dict, value)
    fields = {name: read(hints[name], given[name]) for name in hints if name in given}
    if not {*hints} <= {*fields, *kind._field_defaults}:
        raise ValueError(value)
    return kind(**fields)


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


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)
