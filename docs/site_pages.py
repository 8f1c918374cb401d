"""For mkdocs: makes pages of README.md, CONTRIBUTING.md and CHANGELOG.md, and fixes their links.

On GitHub pages link to files of the repository, too. The site has no copy of those: there such a
link is the file's path alone. And each cell of a table gets its column's title: where a screen is
narrow, site.css makes a list of the table.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Callable

from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in PAGES.items():
        text = (FOLDER / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links as GitHub has them into those of the site."""
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def fix(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        path, hash_mark, anchor = target.partition("#")
        if not path or "://" in target:
            return link[0]
        where = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        to = PAGES.get(where, where[5:] if re.match(r"docs/.*\.(md|svg)$", where) else "")
        if to:
            to = posixpath.relpath(to, posixpath.dirname(page.file.src_uri) or ".")
            return f"{mark}[{text}]({to}{hash_mark}{anchor})"
        return text if re.search(r"[./]", text) else f"{text} (`{where}`)"

    return LINK.sub(fix, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a table the title of its column."""

    def name(table: re.Match[str]) -> str:
        head, *rows = re.split(r"(?=<tr>)", table[0].partition("<tr>")[2])
        titles = [_words(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", head, re.DOTALL)]
        return table[0].partition("<tr>")[0] + "<tr>" + head + "".join(map(named(titles), rows))

    return re.sub(r"<table>.*?</table>", name, html, flags=re.DOTALL)


def named(titles: list[str]) -> Callable[[str], str]:
    """Return what names the cells of a row after their columns."""

    def row(text: str) -> str:
        columns = iter(titles)
        return re.sub(r"<td(?=[ >])", lambda _: f'<td data-title="{next(columns)}"', text)

    return row


def _words(cell: str) -> str:
    return re.sub(r"<[^>]*>", "", cell).replace('"', "&quot;")
