"""examples/fetch_hymenoptera.py, with an archive of the test's own."""

import hashlib
import importlib.util
import io
import zipfile

import pytest
from conftest import REPO


@pytest.fixture
def fetch():
    path = REPO / "examples" / "fetch_hymenoptera.py"
    spec = importlib.util.spec_from_file_location("fetch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve(tmp_path):
    """Put bytes where an address leads: serve(b"...") -> a URL."""

    def give(content):
        (tmp_path / "archive.zip").write_bytes(content)
        return (tmp_path / "archive.zip").as_uri()

    return give


def archive(*names):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(name, "picture")
    return buffer.getvalue()


def test_it_checks_and_unpacks(fetch, serve, tmp_path, capsys):
    content = archive("hymenoptera_data/train/ants/0.jpg")
    fetch.SHA256 = hashlib.sha256(content).hexdigest()
    argv = [str(tmp_path / "data"), serve(content)]
    assert fetch.main(argv) == 0
    assert (tmp_path / "data/hymenoptera_data/train/ants/0.jpg").read_text() == "picture"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["hymenoptera_data"]
    assert fetch.main(argv) == 0
    assert "is there already" in capsys.readouterr().out


OUTSIDE = "outside of its folder"


@pytest.mark.parametrize(
    ("name", "known", "limit", "says"),
    [
        ("hymenoptera_data/other", False, None, "SHA-256 {}; expected fbc41b31"),
        ("hymenoptera_data/other", True, 3, "more than 3 bytes"),
        ("../outside", True, None, OUTSIDE),
        ("/outside", True, None, OUTSIDE),
        ("hymenoptera_data/../../outside", True, None, OUTSIDE),
    ],
)
def test_what_is_refused_leaves_nothing(fetch, serve, tmp_path, name, known, limit, says):
    content = archive("hymenoptera_data/train/ants/0.jpg", name)
    digest = hashlib.sha256(content).hexdigest()
    fetch.SHA256 = digest if known else fetch.SHA256
    fetch.LIMIT = limit or fetch.LIMIT
    assert says.format(digest) in fetch.main([str(tmp_path / "data"), serve(content)])
    assert list((tmp_path / "data").iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_no_network(fetch, tmp_path):
    text = fetch.main([str(tmp_path / "data"), "http://127.0.0.1:1/archive.zip"])
    assert text.startswith("cannot fetch http://127.0.0.1:1/archive.zip: ")
