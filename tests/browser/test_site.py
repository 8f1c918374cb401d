"""The site, read from files without a network, in Chromium: narrow and dark screens, the search."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
WIDE = "all => all.filter(one => one.getBoundingClientRect().right > innerWidth)"
WIDE += ".map(one => one.textContent)"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run([*build, "--config-file", str(REPO / "mkdocs.yml")], check=True, timeout=120)
    return folder


@pytest.fixture
def read(visit, site):
    """Return what opens a page of the site."""
    return lambda path, *how: visit(site / path, *how)


def test_no_page_is_wider_than_a_phone(read, site):
    pages = sorted(path.relative_to(site) for path in site.rglob("*.html"))
    assert len(pages) > 15
    wide = []
    for path in pages:
        page = read(path, 390)
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(str(path))
        # A table is a list there, which nobody has to scroll sideways; a block of code may be.
        tables = page.locator(".md-typeset table:not([class])")
        wide += [f"{path}: {text[:60]}" for text in tables.evaluate_all(WIDE)]
    assert wide == []


@pytest.mark.parametrize("path", ["logs.html", "development/hosts.html"])
def test_the_search_finds_a_word_from_a_file(read, path):
    page = read(path)
    page.keyboard.press("/")
    page.keyboard.type("parallelize_module")
    found = page.locator(".md-search-result__link").first
    found.wait_for()
    found.click()
    page.wait_for_url("**/systems.html*")
    assert "parallelize_module" in page.locator("article").inner_text()


@pytest.mark.parametrize("width", [1280, 390])
def test_text_can_be_read_on_light_and_dark_screens(read, width):
    for scheme, is_dark in (("light", False), ("dark", True)):
        page = read("troubleshooting.html", width, scheme)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        parts = [int(part) for part in ground.strip("rgba()").split(",")[:3]]
        assert (max(parts) < 90) is is_dark, (scheme, ground)
