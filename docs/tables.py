"""Prints tables into pages: of options and exit codes.

    make docs                          # fill them in, and build the site
    python docs/tables.py              # fill them in; the launcher has to be importable

Each stands between two comments: `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

from launcher.errors import EXIT_CODES
from launcher.job.help import GROUPS, default_of
from launcher.job.options import OPTIONS
from launcher.text.words import flag

HERE = Path(__file__).parent
PAGES = [HERE / "options.md"]


def table(*head: str) -> Iterator[str]:
    """Return the first two lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"


def options() -> str:
    """Return the tables of the launcher's options, one for each group."""
    lines: list[str] = []
    for name, option in OPTIONS.items():
        if name in GROUPS:
            lines += ["", f"**{GROUPS[name]}**", ""]
            lines += table("option", "value", "default", "meaning")
        value, default = code(*option.metavar.split("|")), code(default_of(name))
        lines.append(f"| {code(flag(name))} | {value} | {default} | {option.help} |")
    return "\n".join(lines[1:])


def code(*words: str) -> str:
    """Return words as code, with "or" between; "" for none."""
    return " or ".join(f"`{word}`" for word in words if word)


def exit_codes() -> str:
    """Return the table of exit codes."""
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join([*table("code", "when"), *rows])


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "exit codes": exit_codes,
}


def filled(page: str) -> str:
    """Return a page with its tables in their places."""

    def fill(place: re.Match[str]) -> str:
        if place[1] not in TABLES:
            return place[0]
        return f"<!-- {place[1]} -->\n{TABLES[place[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (?!end)(.+?) -->\n(?s:[^<]|<(?!!--))*<!-- end -->", fill, page)


def main() -> None:
    """Fill the tables in."""
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
