"""The pages as a site: `mkdocs build --strict`, as `make docs` has it, ends without a warning."""

import re
import subprocess
import sys

import pytest
from conftest import REPO


@pytest.mark.systems
def test_the_site_is_built_without_warnings(tmp_path):
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet hides from --strict
    done = subprocess.run(
        [*mkdocs, "--config-file", str(REPO / "mkdocs.yml"), "--site-dir", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for path in tmp_path.glob("*.html"):  # what Markdown has not taken for a table or a block
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)
        assert re.findall(r"^\| .*|^```.*", text, re.MULTILINE) == [], path.name
    page = (REPO / "docs" / "how-it-works.md").read_text()
    built = (tmp_path / "how-it-works.html").read_text()
    assert built.count('<pre class="mermaid">') == page.count("```mermaid") > 0
