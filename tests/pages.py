"""The pages that people read: their links, and the commands in them with what they print."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from conftest import REPO

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
# The user's, in the order of the site.
NAMES = "quickstart guide options logs troubleshooting frameworks debugging systems compatibility"
USER_PAGES = [REPO / "README.md", *(REPO / "docs" / f"{name}.md" for name in NAMES.split())]
# A command whose comment begins with one of these is not run by the tests.
NOT_RUN = re.compile(r"\s#\s*(AWS|GPU|registry|long|in a job)\b")


class Block(NamedTuple):
    """The commands of one block of a page, and what the page shows of their output."""

    page: Path
    line: int
    commands: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def to_run(self) -> tuple[str, ...]:
        return tuple(command for command in self.commands if not NOT_RUN.search(command))


def blocks(page: Path) -> list[Block]:
    """Return the blocks of console or bash of a page; commands are lines that begin with $."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in re.finditer(r"^```(?:console|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        commands, shown = [], []
        goes_on = False
        for line in block[1].splitlines():
            if goes_on:
                commands[-1] += f"\n{line}"
            elif line.startswith("$ "):
                commands.append(line[2:])
            else:
                shown.append(line)
            goes_on = line.endswith("\\") and (goes_on or line.startswith("$ "))
        number = text.count("\n", 0, block.start()) + 1
        found.append(Block(page, number, tuple(commands), tuple(shown)))
    return found


def code(page: Path, language: str) -> list[str]:
    """Return the blocks of a page that are in a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def words(page: Path) -> int:
    """Return how many words a page has, without the tables between two comments."""
    text = page.read_text(encoding="utf-8")
    own = re.sub(r"<!-- (?!end).*?<!-- end -->|<!--.*?-->", "", text, flags=re.DOTALL)
    return len(re.findall(r"\S*\w\S*", own))


def named_in(page: Path, table: str) -> set[str]:
    """Return the names in the first column of a page's table, between two comments."""
    text = page.read_text(encoding="utf-8").partition(f"<!-- {table} -->")[2]
    return {*re.findall(r"^\| `(\w+)` \|", text.partition("<!-- end -->")[0], re.MULTILINE)}


# What events.jsonl may have: docs/logs.md lists it.
EVENTS, FIELDS = (named_in(REPO / "docs" / "logs.md", of) for of in ("events", "fields of events"))


def masked(line: str) -> str:
    """Return a line without what differs from run to run: times, ports, folders, cores."""
    line = re.sub(r'(?<=File ").*?(?=[^/"]+/[^/"]+")', "", line)  # but the last folder and the file
    line = re.sub(r"^\S*/bin/", "", line)
    line = re.sub(r"\b\d+(\.\d+)?(?= s\b|%| core)", "N", line)
    return re.sub(r"(?<=:)\d{5}\b|local-\d+-\d+(-\d+)?", "N", line.expandtabs())


def by_host(lines: list[str]) -> dict[str, list[str]]:
    """Return lines by the host whose prefix they have; hosts' lines come in any order."""
    found = defaultdict(list)
    for line in lines:
        host = re.match(r"algo-\d+ \| ", line)
        found[host[0] if host else ""].append(masked(line))
    return found


def missing(shown: tuple[str, ...], output: str) -> list[str]:
    """Return the lines that a page shows and that did not come, or not in that order.

    A line `...` stands for any number of lines.
    """
    came = by_host(output.splitlines())
    absent = []
    for host, lines in by_host([line for line in shown if line != "..."]).items():
        left = iter(came[host])
        absent += [host + line for line in lines if line not in left]
    return absent


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's titles, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def links(page: Path) -> list[tuple[str, str]]:
    """Return the links of a page that are no addresses: path and anchor, each "" for none."""
    found = re.findall(r"\]\(([^)\s#]*)#?([^)\s]*)\)", prose(page))
    return [(path, anchor) for path, anchor in found if "://" not in path]
