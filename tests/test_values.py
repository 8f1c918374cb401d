"""The launcher's own NamedTuple against typing's."""

import pickle
import typing

import pytest

from launcher.values import NamedTuple


class Ours(NamedTuple):
    """A docstring."""

    a: int
    b: str
    c: float = 1.5

    @property
    def twice(self) -> int:
        return 2 * self.a


class Typings(typing.NamedTuple):
    a: int
    b: str
    c: float = 1.5


class Empty(NamedTuple):
    """No field."""


@pytest.mark.parametrize("args", [(1, "x"), (1, "x", 2.5)])
@pytest.mark.parametrize("named", [{}, {"b": "y"}, {"c": 3.5}, {"d": 4}, {"b": "y", "c": 3.5}])
def test_it_takes_what_typings_takes(args, named):
    for given in (args, args[:1], args[:0], (*args, 0, 0)):
        try:
            expected = Typings(*given, **named)
        except TypeError:
            with pytest.raises(TypeError, match="Ours has the fields a, b, c"):
                Ours(*given, **named)
        else:
            assert Ours(*given, **named) == expected


def test_it_gives_what_typings_gives():
    ours, typings = Ours(1, "x"), Typings(1, "x")
    assert (ours.a, ours.b, ours.c, ours.twice) == (1, "x", 1.5, 2)
    assert ours._replace(c=2.0, a=3) == typings._replace(c=2.0, a=3)
    assert ours._asdict() == typings._asdict() and ours._fields == typings._fields
    assert repr(ours) == repr(typings).replace("Typings", "Ours")
    assert Ours._field_defaults == Typings._field_defaults
    assert pickle.loads(pickle.dumps(ours)) == ours and hash(ours) == hash(typings)
    assert repr(Empty()) == "Empty()" and Empty() == ()
    with pytest.raises(ValueError, match="Ours has no field d"):
        ours._replace(d=1)
    for name in ("a", "d"):
        with pytest.raises(AttributeError):
            setattr(typings, name, 2)
        with pytest.raises(AttributeError, match=f"Ours has no {name} that can be set"):
            setattr(ours, name, 2)
