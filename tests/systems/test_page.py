"""docs/systems.md: the scripts that its tables name."""

import re

from conftest import REPO

PAGE = (REPO / "docs" / "systems.md").read_text(encoding="utf-8")


def test_each_script_that_a_command_names_exists():
    folders = ("examples", "examples/systems", "train_scripts")
    scripts = {path.name for folder in folders for path in (REPO / folder).glob("*.py")}
    tables, _, _ = PAGE.partition("## Model parallelism")
    commands = [row.split(" | ")[1] for row in tables.splitlines() if row.count(" | ") == 2]
    named = {name for command in commands for name in re.findall(r"\b\w+\.py\b", command)}
    assert len(named) > 15
    assert named <= scripts
