"""README.md and docs/: links, length, tables from the code, and what the first pages have run."""

import os
import re
import runpy
import subprocess
import sys

import pytest
from cluster.engine import copy_tracked_files
from conftest import REPO
from pages import NOT_RUN, PAGES, USER_PAGES, anchors, blocks, links, missing, words

from launcher.job.options import INTERNAL

README = REPO / "README.md"
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
    """Of the symptoms in troubleshooting.md, each run of words stands in code or in a test."""
    folders = ("launcher", "tests")
    code = "".join(path.read_text() for name in folders for path in (REPO / name).rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    page = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    named = [run for text in re.findall(r"`(.+?)`", symptoms) for run in RUN.findall(text)]
    assert len(named) > 25
    assert [run for run in named if run not in code] == []


def test_the_users_pages_are_short():
    lengths = {page.name: words(page) for page in USER_PAGES}
    assert sum(lengths.values()) < 12_300, lengths


def test_the_tables_are_those_of_the_code():
    tables = runpy.run_path(str(REPO / "docs" / "tables.py"))
    places = []
    for page in tables["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert tables["filled"](text) == text, f"{page.name}: make docs"
        places += re.findall(r"<!-- (?!end)(.+) -->", text)
    assert {*tables["TABLES"]} <= {*places}


def test_each_variable_that_is_read_is_in_the_table():
    """As far as its name says that it is SageMaker's, torchrun's or ours."""
    files = list(REPO.glob("launcher*/**/*.py"))
    read = r'(?:environ\.get\(|environ\[|count\(|\bin \()\s*"((?:SM|SAGEMAKER|TRAINING)_[A-Z_]+)"'
    names = {name for file in files for name in re.findall(read, file.read_text())}
    assert len(names) > 8
    assert {name for name in names if f"`{name}`" not in OPTIONS} == set()
    assert {name for name in INTERNAL if f"`{name}`" in OPTIONS} == {"LAUNCHER_INIT"}


def test_marks_say_why_a_command_is_not_run():
    assert NOT_RUN.search("make image   # registry: on a public image")
    assert not NOT_RUN.search("make image   # with a long registry")


@pytest.mark.torch
def test_the_readmes_failure_prints_what_it_shows(tmp_path):
    (first,) = (block for block in blocks(README) if block.commands == ("make failure",))
    copy_tracked_files(tmp_path)
    # make's own variables would have it say which folder it is in.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    make = ["make", f"VENV={sys.prefix}", "failure"]
    done = subprocess.run(make, env=environ, cwd=tmp_path, **output)
    assert done.returncode == 0, done.stdout
    assert missing(first.shown, done.stdout) == [], done.stdout
    # What SageMaker shows is on the page to its last line.
    last = re.compile(r"^The job failed.*", re.MULTILINE | re.DOTALL)
    (end,), (end_shown,) = last.findall(done.stdout), last.findall("\n".join(first.shown))
    assert len(end.splitlines()) == len(end_shown.splitlines())
    reasons = [tmp_path / f"runs/failure/algo-{host}/output/failure" for host in (1, 2)]
    assert len({path.read_text() for path in reasons}) == 1
    assert os.listdir(tmp_path / "runs") == ["failure"]
