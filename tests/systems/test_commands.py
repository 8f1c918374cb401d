"""Every command of README.md and docs/ that stands in a block, after `$ `, and what it prints.

Not those with a comment that begins with AWS, GPU, registry, long or "in a job": a test cannot run
these. A page's blocks are run one after the other, in a copy of the tracked files with a
`train.py`, a folder `data/train`, and an environment of its own, into which they may install.
"""

import os
import re
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from cluster.engine import copy_tracked_files
from conftest import completed
from pages import PAGES, blocks, missing

BLOCKS = {page.name: [block for block in blocks(page) if block.to_run] for page in PAGES}
TRAIN = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
print("rank", os.environ["RANK"], "trained", parser.parse_args().epochs, "epochs", flush=True)
"""


@pytest.fixture
def place(page, tmp_path, monkeypatch):
    """A clone to run commands in, with this environment's packages and one more to install into."""
    clone, own = tmp_path / "clone", tmp_path / "venv"
    copy_tracked_files(clone)
    (clone / "train.py").write_text(TRAIN)
    (clone / "data" / "train").mkdir(parents=True)
    commands = [command for block in BLOCKS[page] for command in block.to_run]
    venv.create(own, with_pip=any(command.startswith("pip ") for command in commands))
    folder = sysconfig.get_path("purelib", vars={"base": str(own)})
    ours = [path for path in sys.path if path.endswith("-packages")]
    (Path(folder) / "ours.pth").write_text("\n".join(ours))
    path = [own / "bin", Path(sys.prefix) / "bin", os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, path)))
    monkeypatch.setenv("MAKEFLAGS", f"VENV={sys.prefix}")
    monkeypatch.chdir(clone)
    return clone


def expecting(command):
    """Return a command for bash that fails unless it ends with the code that its comment names."""
    code = re.search(r"#.*\bexits with (\d+)", command)
    return f"{command.partition('#')[0]} || test $? = {code[1]}" if code else command


def test_every_block_has_commands():
    assert sum(map(len, BLOCKS.values())) > 5
    assert [block.name for page in PAGES for block in blocks(page) if not block.commands] == []


@pytest.mark.systems
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page, found in BLOCKS.items() if found])
def test_a_pages_commands_run(page, place):
    for block in BLOCKS[page]:
        commands = "\n".join(["exec 2>&1", *map(expecting, block.to_run)])
        done = completed("bash", "-exc", commands, timeout=580)
        assert missing(block.shown, done.stdout) == [], f"{block.name}: {done.stdout}"
