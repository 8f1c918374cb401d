"""docs/systems.md: the script of Horovod's twin, and the scripts that its tables name."""

import re

import pytest
from conftest import REPO

PAGE = (REPO / "docs" / "systems.md").read_text(encoding="utf-8")


@pytest.mark.torch
def test_horovods_twin_trains(ranks):
    done = ranks.run(REPO / "examples" / "systems" / "horovod_as_ddp.py", count=2)
    assert done.codes == [0, 0], done.err
    loss = re.fullmatch(r"loss (\S+) on rank 0 of 2\n", done.out)
    assert loss and float(loss[1]) < 0.1  # 5 with the weights 0


def test_each_script_that_a_command_names_exists():
    folders = ("examples", "examples/systems", "train_scripts")
    scripts = {path.name for folder in folders for path in (REPO / folder).glob("*.py")}
    tables, _, _ = PAGE.partition("## Model parallelism")
    commands = [row.split(" | ")[1] for row in tables.splitlines() if row.count(" | ") == 2]
    named = {name for command in commands for name in re.findall(r"\b\w+\.py\b", command)}
    assert len(named) > 15
    assert named <= scripts
