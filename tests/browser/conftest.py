"""A browser of this machine, and the page of `sm-launch timeline` in it (`make test-pages`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from timelines import write

from launcher_tools import timeline as tool

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the browser once."""
    paths = filter(None, map(shutil.which, NAMES))
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=next(paths))


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Return what opens the page of some hosts' files; it must raise nothing, and load nothing."""
    contexts, wrong = [], []

    def open_page(files: dict[str, str], width: int = 1280, scheme: Any = "light") -> Page:
        folder = write(tmp_path / "logs", files)
        tool.write(tool.read(str(folder)), str(folder / "timeline.html"))
        size = {"width": width, "height": 844 if width < 640 else 800}
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        own = f"file://{folder}/timeline.html"
        page.on("request", lambda request: wrong.extend({request.url} - {own}))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(own)
        return page

    yield open_page
    assert wrong == []
    for context in contexts:
        context.close()
