"""docs/development/how-it-works.md against the code: what its pictures and files name.

make docs draws the pictures.
"""

import re
import runpy

import pytest
from conftest import REPO

PAGE = (REPO / "docs" / "development" / "how-it-works.md").read_text(encoding="utf-8")
DRAWING = runpy.run_path(str(REPO / "docs" / "pictures.py"))


@pytest.mark.parametrize("name", DRAWING["PICTURES"])
def test_the_page_shows_the_picture_as_it_is_drawn(name):
    path = REPO / "docs" / "development" / f"{name}.svg"
    assert path.read_text(encoding="utf-8") == DRAWING["drawn"](DRAWING["PICTURES"][name]), (
        "make docs"
    )
    assert f"]({name}.svg)" in PAGE


def test_files_and_functions_that_the_page_names_exist():
    (part,) = re.findall(r"has every module:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    files = re.findall(r"\b[\w/]+\.py", part)
    assert len(files) > 10
    for path in files:
        assert (REPO / "launcher" / path).is_file(), path
    for function, path in re.findall(r"`(\w+)` in\s+(?:\[)?([\w/]+\.py)", PAGE):
        text = (REPO / "launcher" / path).read_text(encoding="utf-8")
        assert f"\ndef {function}(" in text, function
