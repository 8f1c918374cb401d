"""NamedTuple, made in a seventh of the time that typing's takes: 0.015 ms and not 0.1 ms a class.

The launcher has some sixty of them, and 60 ms of CPU in all (docs/measurements.md).
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class NamedTuple(tuple):
        """As typing.NamedTuple, as far as the launcher needs it.

        One without fields is falsy, and equals any other such: tell them apart by type.
        """

        __slots__ = ()

        def __init_subclass__(cls):
            cls._fields = tuple(getattr(cls, "__annotations__", ()))
            own = cls.__dict__
            cls._field_defaults = {name: own[name] for name in cls._fields if name in own}
            for index, name in enumerate(cls._fields):
                setattr(cls, name, property(itemgetter(index)))

        def __new__(cls, *values, **named):
            """Make one of values by position and by name. Raises TypeError for others."""
            if named or len(values) != len(cls._fields):
                given = {**cls._field_defaults, **named}
                missing = cls._fields[len(values) :]
                values += tuple([given[name] for name in missing if name in given])
                if len(values) != len(cls._fields) or not set(named) <= set(missing):
                    raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}")
            return tuple.__new__(cls, values)

        def __setattr__(self, name, value):
            raise AttributeError(f"{type(self).__name__} has no {name} that can be set")

        def __getnewargs__(self):
            return tuple(self)

        def __repr__(self):
            shown = (f"{name}={value!r}" for name, value in zip(self._fields, self))
            return f"{type(self).__name__}({', '.join(shown)})"

        def _replace(self, **changes):
            """Return a copy with some of the fields changed."""
            values = [changes.pop(name, value) for name, value in zip(self._fields, self)]
            if changes:
                raise ValueError(f"{type(self).__name__} has no field {', '.join(changes)}")
            return tuple.__new__(type(self), values)

        def _asdict(self):
            """Return the values by their fields' names."""
            return dict(zip(self._fields, self))
