"""examples/fetch_hymenoptera.py, with an archive of the test's own."""

import hashlib
import importlib
import zipfile
from pathlib import Path

import pytest
from conftest import REPO


@pytest.fixture
def fetch(monkeypatch):
    monkeypatch.syspath_prepend(REPO / "examples")
    return importlib.import_module("fetch_hymenoptera")


@pytest.fixture
def archive(tmp_path):
    """Make an archive of files: archive("name") -> where it is, its SHA-256."""

    def make(*names):
        path = tmp_path / "archive.zip"
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, "picture")
        return path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest()

    return make


def test_it_checks_and_unpacks(fetch, archive, capsys, monkeypatch):
    url, digest = archive("hymenoptera_data/train/ants/0.jpg")
    monkeypatch.setattr(fetch, "SHA256", digest)
    argv = ["data", url]
    assert fetch.main(argv) == 0
    assert Path("data/hymenoptera_data/train/ants/0.jpg").read_text() == "picture"
    assert [path.name for path in Path("data").iterdir()] == ["hymenoptera_data"]
    assert fetch.main(argv) == 0
    assert "is there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "known", "limit", "says"),
    [
        ("hymenoptera_data/other", False, 99, "SHA-256 {}; expected fbc41b31"),
        ("hymenoptera_data/other", True, 3, "more than 3 bytes"),
        ("../outside", True, 99, "outside of its folder"),
        ("/outside", True, 99, "outside of its folder"),
    ],
)
def test_what_is_refused_leaves_nothing(fetch, archive, monkeypatch, name, known, limit, says):
    url, digest = archive("hymenoptera_data/train/ants/0.jpg", name)
    monkeypatch.setattr(fetch, "SHA256", digest if known else fetch.SHA256)
    monkeypatch.setattr(fetch, "LIMIT", limit)
    assert says.format(digest) in fetch.main(["data", url])
    assert list(Path("data").iterdir()) == []
    assert not Path("outside").exists()


def test_no_network(fetch):
    text = fetch.main(["data", "http://127.0.0.1:1/archive.zip"])
    assert text.startswith("cannot fetch http://127.0.0.1:1/archive.zip: ")
