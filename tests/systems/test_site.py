"""The pages as a site: `mkdocs build --strict`, as `make docs` has it, ends without a warning."""

import re
import sys

import pytest
from conftest import REPO, completed


@pytest.mark.systems
def test_the_site_is_built_without_warnings(tmp_path):
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet hides from --strict
    done = completed(*mkdocs, "--config-file", REPO / "mkdocs.yml", "--site-dir", tmp_path)
    assert "WARNING" not in done.stderr, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert tmp_path / "development" / "how-it-works.html" in pages
    for path in pages:  # what Markdown has not taken for a table or a block; what needs a network
        text = path.read_text()
        assert re.findall(r"<(?:script|img|iframe)[^>]* src=.?http[^>]*>", text) == [], path.name
        text = re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
        assert re.findall(r"^\| .*|^```.*", text, re.MULTILINE) == [], path.name
