"""The code in docs/systems*.md that says that this test runs it."""

import re

import pytest
from conftest import REPO

pytestmark = pytest.mark.torch

PAGES = sorted((REPO / "docs").glob("systems*.md"))


def blocks(first_line):
    """Return the blocks of Python with that in their first line."""
    found = []
    for page in PAGES:
        found += re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in found if first_line in block.partition("\n")[0]]


def test_horovods_twin_trains(ranks, script):
    (twin,) = blocks("Run by tests/systems/test_docs_twins.py")
    done = ranks.run(script(twin), count=2)
    assert done.codes == [0, 0], done.err
    loss = re.fullmatch(r"loss (\S+) on rank 0 of 2\n", done.out)
    assert loss and float(loss[1]) < 0.1  # 5 with the weights 0


def test_horovods_own_script_is_marked_and_compiles():
    (script,) = blocks("Not run by our tests")
    compile(script, "horovod", "exec")
