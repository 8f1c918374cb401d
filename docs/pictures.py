"""Draws the picture of development/how-it-works.md: the phases of both state machines, as SVG.

make docs                   # draws it, with all else that the pages need
python docs/pictures.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

HERE = Path(__file__).parent / "development"
WIDTH, HEIGHT = 116, 34  # of a box
LINE = 17  # from a line of text to the next
START = "(start)"  # a dot


class Arrow(NamedTuple):
    """From a phase to the next; what stands at it is moved by `at` from the arrow's middle."""

    source: str
    target: str
    events: tuple[str, ...] = ()
    bend: float = 0  # how far its middle is beside the straight line, to the right of its way
    at: tuple[float, float] = (0, 0)


class Picture(NamedTuple):
    """The middles of the phases' boxes, and the arrows between them."""

    title: str
    size: tuple[int, int]
    phases: Mapping[str, tuple[int, int]]
    arrows: Sequence[Arrow]
    captions: Mapping[str, tuple[int, int]]


PICTURES = {
    "machines": Picture(
        "The phases of a host's run, and of the coordinator",
        (690, 480),
        {
            START: (120, 14),
            "Joining": (120, 60),
            "Running": (120, 170),
            "Ending": (120, 280),
            "Leaving": (120, 370),
            "Done": (120, 450),
            START + "2": (490, 14),
            "Joining ": (490, 60),
            "Running ": (370, 170),
            "Deciding": (610, 170),
            "Clearing": (490, 280),
            "Ended": (490, 390),
        },
        (
            Arrow(START, "Joining"),
            Arrow("Joining", "Running", ("Start",), at=(-30, 0)),
            Arrow("Joining", "Ending", ("End",), 88, at=(4, 0)),
            Arrow("Running", "Ending", ("Stop", "End"), -14, at=(34, 0)),
            Arrow("Ending", "Running", ("Start",), -14, at=(-30, 0)),
            Arrow("Ending", "Leaving", ("Leave",), at=(26, 0)),
            Arrow("Leaving", "Done", ("NothingLeft",), at=(42, 0)),
            Arrow(START + "2", "Joining "),
            Arrow("Joining ", "Running ", ("all have joined",), at=(-44, 0)),
            Arrow("Joining ", "Deciding", ("Failure", "Lost"), at=(34, 0)),
            Arrow("Running ", "Deciding", ("Failure", "Lost"), at=(0, -14)),
            Arrow("Running ", "Clearing", ("Stop", "Succeeded"), -10, at=(52, -10)),
            Arrow("Deciding", "Clearing", ("Time", "Stop"), at=(34, 6)),
            Arrow("Clearing", "Running ", ("Cleared",), -10, at=(-38, 8)),
            Arrow("Clearing", "Ended", ("Cleared",), at=(34, 0)),
        ),
        {"a host's run": (190, 19), "the coordinator": (566, 19)},
    ),
}

STYLE = """
    :root { color: #1f2328; }
    .box { fill: #ddf4ff; stroke: #0969da; }
    .way { fill: none; stroke: #57606a; stroke-width: 1.3; }
    .head, .dot { fill: #57606a; }
    text { font: 14px -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif;
      fill: #1f2328; text-anchor: middle; }
    .label { font-size: 12.5px; paint-order: stroke; stroke: #ffffff; stroke-width: 5px;
      fill: #424a53; }
    .ground { fill: #ffffff; }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #1e2129; }
      .box { fill: #12293f; stroke: #58a6ff; }
      .way { stroke: #9da7b3; }
      .head, .dot { fill: #9da7b3; }
      text { fill: #e6edf3; }
      .label { stroke: #1e2129; fill: #c3ccd6; }
    }
"""


def drawn(picture: Picture) -> str:
    """Return the picture as SVG."""
    width, height = picture.size
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img">',
        f"  <title>{escape(picture.title)}</title>",
        f"  <style>{STYLE}  </style>",
        '  <defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8"'
        ' markerHeight="8" orient="auto"><path class="head" d="M0 0 10 5 0 10z"/></marker></defs>',
        f'  <rect class="ground" width="{width}" height="{height}"/>',
    ]
    ways = [_way(arrow, picture.phases) for arrow in picture.arrows]
    lines += [f'  <path class="way" marker-end="url(#head)" d="{path}"/>' for path, _ in ways]
    for phase, (x, y) in picture.phases.items():
        lines += _box(phase, x, y)
    for caption, (x, y) in picture.captions.items():
        lines.append(f'  <text class="label" x="{x}" y="{y}">{escape(caption)}</text>')
    for arrow, (_, middle) in zip(picture.arrows, ways):
        lines += _label(arrow, middle)
    return "\n".join([*lines, "</svg>", ""])


def _box(phase: str, x: int, y: int) -> Iterator[str]:
    if phase.startswith(START):
        yield f'  <circle class="dot" cx="{x}" cy="{y}" r="6"/>'
        return
    left, top = x - WIDTH // 2, y - HEIGHT // 2
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    yield f'  <rect class="box" x="{left}" y="{top}" {size} rx="6"/>'
    yield f'  <text x="{x}" y="{y + 5}">{escape(phase)}</text>'


def _label(arrow: Arrow, middle: tuple[float, float]) -> Iterator[str]:
    """Yield what stands at an arrow, two events in a line."""
    words = [", ".join(arrow.events[n : n + 2]) for n in range(0, len(arrow.events), 2)]
    x, y = middle[0] + arrow.at[0], middle[1] + arrow.at[1] - LINE * (len(words) - 1) / 2 + 4
    for number, line in enumerate(words):
        more = "," if number < len(words) - 1 else ""
        place = f'x="{x:.0f}" y="{y + LINE * number:.0f}"'
        yield f'  <text class="label" {place}>{escape(line)}{more}</text>'


def _way(arrow: Arrow, phases: Mapping[str, tuple[int, int]]) -> tuple[str, tuple[float, float]]:
    """Return an arrow's path, from edge to edge, and its middle."""
    (x1, y1), (x2, y2) = phases[arrow.source], phases[arrow.target]
    length = math.hypot(x2 - x1, y2 - y1)
    # The control point of a curve is twice as far from the line as its middle.
    x = (x1 + x2) / 2 - (y2 - y1) / length * arrow.bend * 2
    y = (y1 + y2) / 2 + (x2 - x1) / length * arrow.bend * 2
    start = _edge(arrow.source, (x1, y1), (x, y))
    end = _edge(arrow.target, (x2, y2), (x, y))
    middle = tuple((a + 2 * c + b) / 4 for a, b, c in zip(start, end, (x, y)))
    path = f"M{start[0]:.1f} {start[1]:.1f}Q{x:.1f} {y:.1f} {end[0]:.1f} {end[1]:.1f}"
    return path, (middle[0], middle[1])


def _edge(
    phase: str, middle: tuple[float, float], towards: tuple[float, float]
) -> tuple[float, float]:
    """Return where a line from the middle of a box leaves it."""
    dx, dy = towards[0] - middle[0], towards[1] - middle[1]
    if phase.startswith(START):
        share = 7 / math.hypot(dx, dy)
    else:
        share = min(
            (WIDTH / 2 + 1) / abs(dx) if dx else math.inf,
            (HEIGHT / 2 + 1) / abs(dy) if dy else math.inf,
        )
    return middle[0] + dx * share, middle[1] + dy * share


def main() -> None:
    """Draw them all."""
    for name, picture in PICTURES.items():
        (HERE / f"{name}.svg").write_text(drawn(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
