"""A browser of this machine, and the page of `sm-launch timeline` in it (`make test-pages`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

FILES = ("file://", "data:", "blob:", "about:")
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the browser once."""
    paths = filter(None, map(shutil.which, NAMES))
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=next(paths))


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return what opens a file's page; it must raise nothing, and load nothing but what it may."""
    contexts, wrong = [], []

    def visit(
        path: Path, width: int = 1280, scheme: Any = "light", loads: tuple[str, ...] = FILES
    ) -> Page:
        size = {"width": width, "height": 844 if width < 640 else 800}
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        context.set_default_timeout(120_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda one: wrong.append(one.text) if loads == () else None)
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        may_load = (path.as_uri(), *loads)
        page.on("request", lambda one: one.url.startswith(may_load) or wrong.append(one.url))
        page.goto(path.as_uri())
        return page

    yield visit
    assert wrong == []
    for context in contexts:
        context.close()
