"""For mkdocs: makes pages of README.md, CONTRIBUTING.md and CHANGELOG.md, and fixes their links.

On GitHub pages link to files of the repository, too. The site has no copy of those: there such a
link is the file's path alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

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
        if where in PAGES:
            return f"{mark}[{text}]({PAGES[where]}{hash_mark}{anchor})"
        if where.startswith("docs/"):
            return f"{mark}[{text}]({where[5:]}{hash_mark}{anchor})"
        return text if re.search(r"[./]", text) else f"{text} (`{where}`)"

    return LINK.sub(fix, markdown)
