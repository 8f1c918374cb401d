"""What a release consists of, and what watches over it: changelog, hooks, workflow."""

import configparser
import email
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from cluster.engine import copy_tracked_files, tracked_files
from conftest import REPO, completed

import launcher

NAME = "sagemaker_torch_launcher"
STEM = f"{NAME}-{launcher.__version__}"
INFO = f"{STEM}.dist-info/"
CI_ALONE = (".ci/", ".github/", ".gitignore")  # what the sdist does without
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Copy this repository as a clean clone would have it."""
    folder = tmp_path_factory.mktemp("clone")
    copy_tracked_files(folder)
    return folder


def build(*arguments) -> None:
    # Without an environment of its own, which pip would have to fill from the network.
    completed(sys.executable, "-m", "build", "--no-isolation", "--quiet", *arguments)


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    return set(tracked_files())


@pytest.fixture(scope="module")
def dist(clone, tmp_path_factory) -> Path:
    """Build the sdist, and from that the wheel, as `make dist` does."""
    folder = tmp_path_factory.mktemp("dist")
    build("--outdir", folder, clone)
    assert {path.name for path in folder.iterdir()} == {f"{STEM}.tar.gz", wheel(folder).name}
    return folder


def wheel(folder) -> Path:
    return folder / f"{STEM}-py3-none-any.whl"


def contents(path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_launcher_and_nothing_else(dist, clone, tracked):
    inside = contents(wheel(dist))
    folders = ("launcher/", "launcher_tools/", "smddp/")
    launchers = {name for name in tracked if name.startswith(folders)} | {"sm_launch.py"}
    assert {name for name in inside if not name.startswith(INFO)} == launchers
    assert all(inside[name] == (clone / name).read_bytes() for name in launchers)
    assert inside[INFO + "licenses/LICENSE"] == (REPO / "LICENSE").read_bytes()
    names = [b"launcher", b"launcher_tools", b"sm_launch", b"smddp"]
    assert inside[INFO + "top_level.txt"].split() == names


def test_the_wheel_says_what_it_is_and_needs_psutil_alone(dist):
    metadata = email.message_from_bytes(contents(wheel(dist))[INFO + "METADATA"])
    assert metadata["Version"] == launcher.__version__
    assert metadata["Requires-Python"] == ">=3.9"
    needed = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert needed == ["psutil>=5.6"]
    commands = configparser.ConfigParser()
    commands.read_string(contents(wheel(dist))[INFO + "entry_points.txt"].decode())
    assert {name: dict(commands[name]) for name in commands.sections()} == {
        "console_scripts": {"sm-launch": "sm_launch:main"}
    }


def test_the_sdist_has_what_the_repository_has(dist, tracked):
    with tarfile.open(dist / f"{STEM}.tar.gz") as archive:
        names = {name.name.partition("/")[2] for name in archive if name.isfile()}
    made = {name for name in names if name == "PKG-INFO" or name.startswith(f"{NAME}.egg-info/")}
    assert names - made == {name for name in tracked if not name.startswith(CI_ALONE)}


def test_the_tree_makes_the_wheel_that_the_sdist_makes(dist, clone, tmp_path):
    build("--wheel", "--outdir", tmp_path, clone)
    assert contents(wheel(tmp_path)) == contents(wheel(dist))


def test_the_changelog_keeps_its_form():
    text = (REPO / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    releases = [
        re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", head) for head in heads[1:]
    ]
    assert all(releases), heads
    versions = [tuple(map(int, release.groups())) for release in releases]
    assert versions == sorted(set(versions), reverse=True)
    current = tuple(map(int, re.findall(r"\d+", launcher.__version__)))
    assert versions[:1] <= [current], "a release that the code has not heard of"
    for section in text.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds], "each once, in this order"


# What a machine has before anything is installed on it, as far as make and its scripts need it.
BASICS = ("basename", "bash", "dirname", "env", "find", "id", "make", "sed", "sh", "tr")
COMPILING = "git gcc libc6-dev python3-dev python3-venv"
ENGINE = "docker.io debootstrap iptables ca-certificates iproute2"
NEEDED = {
    "test": COMPILING,
    "test-systems": COMPILING,
    "test-containers": f"{COMPILING} {ENGINE} docker-compose",
    "test-slow": f"{COMPILING} {ENGINE} docker-compose",
    "matrix": f"{COMPILING} {ENGINE}",
}


@pytest.fixture
def bare(tmp_path):
    """Return a machine's PATH: the basics, and an apt-get and a sudo that leave a note."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in BASICS:
        (folder / name).symlink_to(shutil.which(name))
    for name in ("apt-get", "sudo"):
        (folder / name).write_text(f"#!/bin/sh\n: > {tmp_path}/installed\nexit 1\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("target", NEEDED)
def test_make_says_in_one_line_what_the_tests_need_and_installs_nothing(
    bare, clone, target, monkeypatch
):
    # Of its own environment alone: this may run below a make.
    command = ["env", "-i", f"PATH={bare}", "make", target, "VENV=none", "PYTHON=none"]
    monkeypatch.chdir(clone)
    done = completed(*command, code=2)
    assert not done.stdout
    line, makes_own = done.stderr.splitlines()
    assert line.startswith(f"make {target} needs ") and makes_own.startswith("make: *** ")
    assert line.endswith(f": apt-get install {NEEDED[target]} (.ci/run installs it, too).")
    assert not (bare.parent / "installed").exists() and not (clone / "none").exists()
