"""docs/systems.md: the code that a test is to run, and the names in the tables."""

import re

import pytest
from conftest import REPO

FOLDERS = ("examples/systems", "train_scripts")
PAGE = (REPO / "docs" / "systems.md").read_text()


def blocks(first_line):
    """Return the blocks of Python with that in their first line."""
    found = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [block for block in found if first_line in block.partition("\n")[0]]


@pytest.mark.torch
def test_horovods_twin_trains(ranks, script):
    (twin,) = blocks("Run by tests/systems/test_page.py")
    done = ranks.run(script(twin), count=2)
    assert done.codes == [0, 0], done.err
    loss = re.fullmatch(r"loss (\S+) on rank 0 of 2\n", done.out)
    assert loss and float(loss[1]) < 0.1  # 5 with the weights 0


def test_horovods_own_script_is_marked_and_compiles():
    (script,) = blocks("Not run by our tests")
    compile(script, "horovod", "exec")


def rows():
    """Return the cells of each row of the tables of examples, the first three of the page."""
    tables = PAGE.partition("\n## Collectives")[0]
    return [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| ")]


def test_each_row_names_a_test_that_exists_or_says_that_it_was_not_run():
    found = [row for row in rows() if row[0] != "the document's example"]
    assert len(found) > 25
    for row in found:
        tests = re.findall(r"\S+\.py", row[-1])
        assert tests or "**not run**" in row[-1], row
        assert all((REPO / "tests" / name.strip(",")).exists() for name in tests), row


def test_each_script_that_a_row_names_exists():
    scripts = {path.name for folder in FOLDERS for path in (REPO / folder).glob("*.py")}
    for row in rows():
        ours = row[2] if len(row) > 2 else ""
        assert set(re.findall(r"\b\w+\.py\b", ours)) <= scripts, row


def test_each_option_that_a_row_names_is_in_one_of_its_tests():
    for row in rows():
        tests = [REPO / "tests" / name for name in re.findall(r"[\w/]+\.py", row[-1])]
        text = "".join(path.read_text() for path in tests)
        for option in re.findall(r"--(?!train-script)[a-z-]+", row[2]) if tests else ():
            name = option.replace("--launcher-", "").replace("-", "_")
            assert option in text or name in text, row
