"""The pages as a site: `mkdocs build --strict`, as `make docs` has it, ends without a warning."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from conftest import REPO

pytestmark = pytest.mark.systems


class Links(HTMLParser):
    """What a page links to, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.anchors = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors.add(attributes.get("id"))
        self.targets |= {attributes[name] for name in ("href", "src") if attributes.get(name)}


def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path):
    site = tmp_path / "site"
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet hides from --strict
    done = subprocess.run(
        [*mkdocs, "--config-file", str(REPO / "mkdocs.yml"), "--site-dir", str(site)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for path in site.glob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)
        assert re.findall(r"^\| .*|^```.*", text, re.MULTILINE) == [], path.name
    pages = {path.name: Links(path.read_text()) for path in site.glob("*.html")}
    assert {"index.html", "how-it-works.html", "options.html"} <= {*pages}
    for name, page in pages.items():
        for target in page.targets if name != "404.html" else ():
            path, _, anchor = target.partition("#")
            if not re.match(r"[a-z]+:", target):
                assert (site / path).exists(), f"{name} links to {target}"
                ours = pages.get(path or name)
                assert not anchor or not ours or anchor in ours.anchors, f"{name}: {target}"


def test_pictures_of_text_are_handed_to_mermaid(tmp_path):
    page = (REPO / "docs" / "how-it-works.md").read_text()
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run([*mkdocs, "--config-file", str(REPO / "mkdocs.yml")], check=True)
    built = (tmp_path / "how-it-works.html").read_text()
    assert built.count('<pre class="mermaid">') == page.count("```mermaid") > 0
