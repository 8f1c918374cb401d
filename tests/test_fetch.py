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


def test_what_is_not_the_archive_is_not_unpacked(fetch, serve, tmp_path):
    content = archive("hymenoptera_data/train/ants/0.jpg")
    text = fetch.main([str(tmp_path / "data"), serve(content)])
    assert f"SHA-256 {hashlib.sha256(content).hexdigest()}; expected fbc41b31" in text
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("name", ["../outside", "/outside", "hymenoptera_data/../../outside"])
def test_nothing_is_written_outside_of_the_folder(fetch, serve, tmp_path, name):
    content = archive("hymenoptera_data/train/ants/0.jpg", name)
    fetch.SHA256 = hashlib.sha256(content).hexdigest()
    assert "outside of its folder" in fetch.main([str(tmp_path / "data"), serve(content)])
    assert list((tmp_path / "data").iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_an_archive_that_is_too_large_is_not_unpacked(fetch, serve, tmp_path):
    content = archive("hymenoptera_data/train/ants/0.jpg")
    fetch.SHA256, fetch.LIMIT = hashlib.sha256(content).hexdigest(), 3
    assert "more than 3 bytes" in fetch.main([str(tmp_path / "data"), serve(content)])
    assert list((tmp_path / "data").iterdir()) == []


def test_no_network(fetch, tmp_path):
    text = fetch.main([str(tmp_path / "data"), "http://127.0.0.1:1/archive.zip"])
    assert text.startswith("cannot fetch http://127.0.0.1:1/archive.zip: ")
