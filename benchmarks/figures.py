"""PURE: what benchmarks/beside.py measured, as a table and as a picture.

A value is a number, NEVER for what did not happen within the bound, FAILED for a job that did not
get that far, or None for what was not tried in that round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union
from xml.sax.saxutils import escape

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
    "cpu": Figure("CPU of a start, 8 ranks", "s", 1, 8, "1.00", "0.20"),
    "memory": Figure("memory of a host with 8 ranks", "MiB", 1, 8),
    "stop": Figure("SIGTERM to the ranks' handlers", "ms", 1, 2),
    "failure": Figure("failure to last host down, no collective", "s", 2, 2),
    "failure-collective": Figure("failure to last host down, in a collective", "s", 2, 2),
    "restart": Figure("failure to the script again, with torch", "s", 1, 2, "1.60", "0.40"),
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


# The picture.

WIDTH, LEFT, RIGHT, LINE, GAP, TOP = 960, 300, 880, 13, 12, 96
# For a light page and for a dark one; ours are blue.
HUES = {
    "notebook": ("#8c959f", "#9198a1"),
    "toolkit": ("#bf8700", "#d29922"),
    "accelerate": ("#8250df", "#ab7df8"),
    "ft_launcher 0.4": ("#4ac26b", "#56d364"),
    "ft_launcher 0.7": ("#1a7f37", "#2ea043"),
    "sm-launch": ("#54aeff", "#79c0ff"),
    "sm-launch warm": ("#0550ae", "#1f6feb"),
}


def style(ways: Sequence[str]) -> str:
    """Return the colours, of which a reader's browser takes those for light or for dark."""

    def colours(text: str, page: str, rule: str, which: int) -> str:
        hues = [HUES[way][which] for way in ways]
        one = [
            f".w{place}{{fill:{hue}}}.l{place}{{stroke:{hue}}}" for place, hue in enumerate(hues)
        ]
        return f"text{{fill:{text}}}.page{{fill:{page}}}.rule{{stroke:{rule}}}{''.join(one)}"

    light = colours("#1f2328", "#ffffff", "#d1d9e0", 0)
    dark = colours("#f0f6fc", "#0d1117", "#3d444d", 1)
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"


def picture(found: Found) -> str:
    """Return an SVG of all ratios to torchrun: bars from 1 to the median, lines for the spread."""
    ways = [way for way in HUES if way in found.ways]
    shown = {
        name: {
            way: ratios(found, name, way) for way in ways if any(found.values[name].get(way, ()))
        }
        for name in found.values
        if any(found.values[name].get(base) for base in BASES)
    }
    all_ratios = [n for lane in shown.values() for one in lane.values() for n in one.numbers]
    low = max(-6, math.floor(math.log2(min([0.5, *all_ratios]))))
    high = min(6, math.ceil(math.log2(max([2.0, *all_ratios]))))

    def x(ratio: float) -> float:
        place = (min(max(math.log2(ratio), low), high) - low) / (high - low)
        return round(LEFT + place * (RIGHT - LEFT), 1)

    height = (
        TOP + sum(LINE * len(lane) + GAP for lane in shown.values()) + 16 * len(found.about) + 16
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="-apple-system, \'Segoe UI\', Helvetica, Arial, '
        '\'DejaVu Sans\', sans-serif" font-size="13">',
        "<title>Launchers compared with plain torchrun, as ratios: left of 1 is less</title>",
        f"<style>{style(ways)}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        '<text x="20" y="28" font-size="16" font-weight="bold">Compared with plain torchrun: '
        "left of 1 is less time, CPU or memory</text>",
    ]
    for place, way in enumerate(ways):
        at = 20 + place * (WIDTH - 40) / max(1, len(ways))
        parts.append(f'<rect class="w{place}" x="{at:.0f}" y="44" width="12" height="12"/>')
        parts.append(f'<text x="{at + 17:.0f}" y="55">{escape(way)}</text>')
    end = height - 16 * len(found.about) - 16
    for power in range(low, high + 1):
        width = 2 if power == 0 else 1
        tick = f"1/{2**-power}" if power < 0 else f"{2**power}"
        parts.append(
            f'<path class="rule" d="M{x(2**power)} {TOP - 12}V{end}" stroke-width="{width}"/>'
        )
        parts.append(f'<text x="{x(2**power)}" y="{TOP - 18}" text-anchor="middle">{tick}</text>')
    y = TOP
    for name, lane in shown.items():
        middle = y + LINE * len(lane) / 2 + 4
        parts.append(f'<text x="20" y="{middle:.0f}">{escape(FIGURES[name].label)}</text>')
        for way, one in lane.items():
            parts += bar(one, ways.index(way), x, y)
            y += LINE
        y += GAP
    for line in found.about:
        parts.append(f'<text x="20" y="{y + 8}" font-size="11">{escape(line)}</text>')
        y += 16
    return "\n".join([*parts, "</svg>", ""])


def bar(one: Summary, place: int, x: Any, y: float) -> Iterator[str]:
    """Return one way's bar in its line of the picture, with its number behind it."""
    middle = y + LINE / 2
    if not one.numbers:
        yield f'<text x="{RIGHT + 6}" y="{middle + 4}" font-size="11">{one.other or "-"}</text>'
        if one.other == NEVER:
            line = f'd="M{x(1)} {middle}H{RIGHT}" stroke-width="2" stroke-dasharray="2 4"'
            yield f'<path class="l{place}" {line}/>'
        return
    begin, end = sorted((x(1), x(one.median)))
    width = max(2.0, round(end - begin, 1))
    yield f'<rect class="w{place}" x="{begin}" y="{y + 1}" width="{width}" height="{LINE - 3}"/>'
    low, high = x(min(one.numbers)), x(max(one.numbers))
    if len(one.numbers) > 1:
        yield f'<path class="rule" d="M{low} {middle}H{high}" stroke-width="2"/>'
    text = ("under " if one.other == NEVER else "") + number(one.median)
    if x(one.median) < x(1):
        at, anchor = min(low, x(one.median)) - 5, "end"
    else:
        at, anchor = max(high, x(one.median)) + 5, "start"
    yield f'<text x="{at}" y="{middle + 4}" font-size="11" text-anchor="{anchor}">{text}</text>'
