"""docs/comparison.md: each cell has a source that exists, and each line is in its package."""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import REPO

PAGE = (REPO / "docs" / "comparison.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[([^\]]+)\](?:\[([^\]]+)\]|\(([^)]+)\))?")
DEFINED = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", PAGE, re.MULTILINE))
TABLES = [
    table.splitlines()[2:]
    for table in re.findall(
        r"^(\| at 3 a.m. .*\n(?:\|.*\n)+|\| for long .*\n(?:\|.*\n)+)", PAGE, re.M
    )
]
# Of the columns, the peers' packages, with the versions that are named above the tables.
VERSIONS = dict(re.findall(r"https://pypi.org/project/([^/]+)/([^/]+)/", PAGE))
PREFIXES = {
    "torch": "torch",
    "accelerate": "accelerate",
    "nvrx": "nvidia-resiliency-ext",
    "toolkit": "sagemaker-training",
    "v3": "sagemaker-train",
}
SOURCES = re.findall(r'^\| <a id="([^"]+)"></a>\1 \| `(\S+)` \| `(.+)` \|$', PAGE, re.MULTILINE)


def rows():
    for table in TABLES:
        for line in table:
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            yield name, cells


def targets(cell):
    """Return where the links of a cell lead; "" for one that leads nowhere."""
    return [url or DEFINED.get(label or text, "") for text, label, url in LINK.findall(cell)]


def test_every_launcher_has_a_cell_in_every_row():
    assert len(list(rows())) > 20
    assert {len(cells) for _, cells in rows()} == {6}


def test_every_cell_names_what_shows_it():
    unproven = [
        (name, cell)
        for name, cells in rows()
        for cell in cells
        if not targets(cell) and cell not in ("no", "not tried")
    ]
    assert not unproven


def anchors(path):
    text = path.read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def test_every_link_leads_somewhere():
    found = [target for _, cells in rows() for cell in cells for target in targets(cell)]
    found += [target for target in DEFINED.values() if target not in found]
    for target in {target for target in found if not target.startswith("https://")}:
        file, _, anchor = target.partition("#")
        path = REPO / "docs" / file if file else REPO / "docs" / "comparison.md"
        assert target and path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_every_source_is_named_by_a_cell_and_has_a_package():
    assert len(SOURCES) == PAGE.count('<a id="')
    assert {name for name, _, _ in SOURCES} == set(DEFINED) - {"run", "matrix"}
    for name, _, _ in SOURCES:
        assert f"][{name}]" in PAGE, name
        assert PREFIXES[name.partition("-")[0]] in VERSIONS


def sources(*, of_ours):
    """Return the lines of the packages that the tests need themselves, or those of the others."""
    ours = ("torch", "toolkit")
    return [source for source in SOURCES if (source[0].partition("-")[0] in ours) is of_ours]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "file", "line"), sources(of_ours=True))
def test_the_line_is_in_an_installed_package(name, file, line):
    package = PREFIXES[name.partition("-")[0]]
    distribution = importlib.metadata.distribution(package)
    if distribution.version.partition("+")[0] != VERSIONS[package]:
        pytest.skip("the page is of another version")  # make test-compat
    assert line in Path(distribution.locate_file(file)).read_text(encoding="utf-8")


@pytest.mark.systems
def test_the_lines_are_in_the_other_packages(tmp_path):
    found = sources(of_ours=False)
    packages = {PREFIXES[name.partition("-")[0]] for name, _, _ in found}
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    # One of them has wheels for Ubuntu's glibc and few versions of Python: any will do to be read.
    pip += ["--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_31_x86_64"]
    pins = [f"{package}=={VERSIONS[package]}" for package in packages]
    subprocess.run([*pip, *pins], check=True)
    for name, file, line in found:
        package = PREFIXES[name.partition("-")[0]].replace("-", "_")
        (wheel,) = tmp_path.glob(f"{package}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert line in archive.read(file).decode(), name
