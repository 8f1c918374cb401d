"""README.md and docs/: links, length, tables from the code, and what the first pages have run."""

import re
import runpy

import pytest
from conftest import REPO
from pages import PAGES, USER_PAGES, anchors, links, words

from launcher.job.options import INIT, INTERNAL, KEEP_EXIT_CODE

OPTIONS = (REPO / "docs" / "options.md").read_text(encoding="utf-8")
WHOLE = [*PAGES, REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md"]
RUN = re.compile(r"[a-z][a-z' ]{7,}[a-z]")  # of a message's words, but what differs from job to job
each_page = pytest.mark.parametrize("page", WHOLE, ids=lambda page: page.name)


@each_page
def test_links_lead_somewhere(page):
    for path, anchor in links(page):
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_words_of_messages_are_those_of_the_code():
    """Of what troubleshooting.md names as symptoms, each run of words is in code or a test."""
    folders = ("launcher", "tests")
    code = "".join(path.read_text() for name in folders for path in (REPO / name).rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    page = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    named = [run for text in re.findall(r"`(.+?)`", symptoms) for run in RUN.findall(text)]
    assert len(named) > 25
    assert [run for run in named if run not in code] == []


def test_pages_are_short():
    """The developers' with the table of equality.md, whose comments are not shown."""
    developers = [*(REPO / "docs" / "development").glob("*.md"), REPO / "CONTRIBUTING.md"]
    for pages, most in ((USER_PAGES, 12_000), (developers, 9_000)):
        lengths = {page.name: words(page) for page in pages}
        assert sum(lengths.values()) < most, lengths


def test_how_it_works_names_what_the_code_has():
    """Of each row of its ways: the file, and the functions that are named after it."""
    page = (REPO / "docs" / "development" / "how-it-works.md").read_text(encoding="utf-8")
    places = re.findall(r"([a-z_]+(?:/[a-z_]+)?\.py)((?:, `\w+`)*)", page)
    functions = 0
    for path, names in places:
        found = [*(REPO / "launcher").rglob(path)]
        assert found, path
        for name in re.findall(r"\w+", names):
            functions += 1
            assert f"def {name}(" in found[0].read_text(), f"{path}, {name}"
    assert functions > 8


def test_the_tables_are_those_of_the_code():
    tables = runpy.run_path(str(REPO / "docs" / "tables.py"))
    places = []
    for page in tables["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert tables["filled"](text) == text, f"{page.name}: make docs"
        places += re.findall(r"<!-- (?!end)(.+) -->", text)
    assert {*tables["TABLES"]} <= {*places}


def test_each_variable_that_is_read_is_in_the_table():
    """As far as its name says that it is SageMaker's, torchrun's or ours; and no other is in it."""
    files = list(REPO.glob("launcher*/**/*.py"))
    read = r'(?:environ\.get\(|environ\[|count\(|\bin \()\s*"((?:SM|SAGEMAKER|TRAINING)_[A-Z_]+)"'
    names = {name for file in files for name in re.findall(read, file.read_text())}
    assert len(names) > 8
    assert {name for name in names if f"`{name}`" not in OPTIONS} == set()
    assert {name for name in INTERNAL if f"`{name}`" in OPTIONS} == {INIT, KEEP_EXIT_CODE}
    code = "".join(file.read_text() for file in files)
    table = OPTIONS.partition("What the launcher reads:")[2].partition("What it sets")[0]
    heads = "".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE))
    listed = set(re.findall(r"`([A-Z_]+)`", heads))
    assert len(listed) > 20
    assert {name for name in listed if f'"{name}"' not in code} == set()
