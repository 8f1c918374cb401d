"""PURE: what benchmarks/beside.py measured, as a table.

A value is a number, NEVER for what did not happen within the bound, FAILED for a job that did not
get that far, or None for what was not tried in that round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

NEVER, FAILED = "never", "failed"
Value = Union[float, str, None]
BASE = "torchrun"  # what others are compared with, round by round
OTHER_BASES = {"ft_launcher 0.7": "torchrun beside 0.7"}  # the same torch with another Python
BASES = (BASE, *OTHER_BASES.values())


class Figure(NamedTuple):
    """What is measured, and up to which ratio to torchrun ours is as it should be."""

    label: str
    unit: str
    hosts: int
    ranks: int  # on each host
    cold: str = ""
    warm: str = ""


FIGURES = {
    "start-1x1": Figure("start to first all-reduce, 1 rank", "s", 1, 1),
    "start-1x2": Figure("start to first all-reduce, 2 ranks", "s", 1, 2, "1.00", "0.60"),
    "start-1x4": Figure("start to first all-reduce, 4 ranks", "s", 1, 4),
    "start-1x8": Figure("start to first all-reduce, 8 ranks", "s", 1, 8, "1.00", "0.30"),
    "start-2x2": Figure("start to first all-reduce, 2 hosts x 2", "s", 2, 2, "1.00", "0.60"),
    "start-8x2": Figure("start to first all-reduce, 8 hosts x 2", "s", 8, 2),
    "whole-1x2": Figure("a job of one all-reduce, 2 ranks", "s", 1, 2, "1.00", "0.60"),
    "whole-1x8": Figure("a job of one all-reduce, 8 ranks", "s", 1, 8, "1.00", "0.30"),
    "cpu": Figure("CPU of a start, 8 ranks", "s", 1, 8, "1.00", "0.20"),
    "memory": Figure("memory of a host with 8 ranks", "MiB", 1, 8),
    "stop": Figure("SIGTERM to the ranks' handlers", "ms", 1, 2),
    "failure": Figure("failure to last host down, no collective", "s", 2, 2),
    "failure-collective": Figure(
        "failure to last host down, in a collective", "s", 2, 2, "1.00", "1.00"
    ),
    "restart": Figure("failure to the script again, with torch", "s", 1, 2, "1.00", "0.10"),
}


class Found(NamedTuple):
    """All that one run of the benchmark found; values are in the order of the rounds."""

    about: tuple[str, ...]  # the machine and the versions, a line each
    patience: float  # seconds until something counts as NEVER
    values: dict[str, dict[str, list[Value]]]  # by figure and by way

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    @property
    def ways(self) -> list[str]:
        return list(dict.fromkeys(way for by_way in self.values.values() for way in by_way))


def from_json(read: Mapping[str, Any]) -> Found:
    return Found(tuple(read["about"]), float(read["patience"]), dict(read["values"]))


class Summary(NamedTuple):
    """The numbers of some rounds; `other` is what happened in rounds that have none."""

    numbers: list[float]
    other: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.numbers)


def summary(values: Sequence[Value]) -> Summary:
    others = [value for value in values if isinstance(value, str)]
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return Summary(numbers, max(set(others), key=others.count) if others else "")


def ratios(found: Found, figure: str, way: str) -> Summary:
    """Return a way's ratios to its torchrun in the same rounds.

    Where torchrun never got there, they are to the bound: less than that is what is known.
    """
    by_way = found.values[figure]
    base = by_way.get(OTHER_BASES.get(way, BASE), [])
    pairs = list(zip(by_way.get(way, ()), base))
    both = [float(a) / float(b) for a, b in pairs if is_number(a) and is_number(b)]
    if both:
        return Summary(both)
    own = summary(by_way.get(way, ()))
    if own.numbers and summary(base).other == NEVER:
        return Summary([number / found.patience for number in own.numbers], NEVER)
    return Summary([], own.other)


def is_number(value: Value) -> bool:
    return isinstance(value, (int, float))


def number(value: float) -> str:
    """Return a number with three digits, or two behind the point."""
    return f"{value:.3f}" if value < 0.1 else f"{value:.{max(0, 2 - int(math.log10(value)))}f}"


def cell(all_of: Summary, rounds: int, mark: str = "") -> str:
    """Return median (min-max), and how many rounds there were if they were not all."""
    if not all_of.numbers:
        return all_of.other or "-"
    low, high = number(min(all_of.numbers)), number(max(all_of.numbers))
    text = f"{mark}{number(all_of.median)}"
    text += f" ({low}-{high})" if len(all_of.numbers) > 1 else ""
    if all_of.other and not mark:
        text += f", {all_of.other} in {rounds - len(all_of.numbers)}"
    return text


def table(found: Found) -> Iterator[str]:
    """Return the lines of the table: two for each figure, in its unit and as ratios to torchrun."""
    ways = found.ways
    yield f"| median (min-max) | | {' | '.join(ways)} | bound, cold / warm |"
    yield "|---" * (len(ways) + 3) + "|"
    for name, by_way in found.values.items():
        figure = FIGURES[name]
        tried = [[v for v in by_way.get(way, ()) if v is not None] for way in ways]
        cells = [cell(summary(values), len(values)) for values in tried]
        yield f"| {figure.label} | {figure.unit} | {' | '.join(cells)} | |"
        if not any(by_way.get(base) for base in BASES):
            continue
        compared = [ratios(found, name, way) for way in ways]
        cells = [
            "1" if way == BASE and one.numbers else cell(one, 0, "< " if one.other == NEVER else "")
            for way, one in zip(ways, compared)
        ]
        bound = f" {figure.cold} / {figure.warm}" if figure.cold else ""
        yield f"| | of torchrun's | {' | '.join(cells)} |{bound} |"
