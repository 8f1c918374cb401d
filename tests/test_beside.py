"""benchmarks/beside.py: the table of recorded figures; and that it still runs."""

import json
import sys

import pytest
from conftest import REPO, completed

BESIDE = [sys.executable, str(REPO / "benchmarks" / "beside.py")]
RECORDED = {
    "about": ["3 rounds, 2 CPUs", "torch 2.13.0, a & b"],
    "patience": 20,
    "values": {
        "start-1x2": {
            "torchrun": [2.0, 4.0, 2.5],
            "accelerate": [None, None, None],
            "ft_launcher 0.4": [2.2, "failed", 3.0],
            "torchrun beside 0.7": [3.0, 4.0, 2.0],
            "ft_launcher 0.7": [6.0, 6.0, 6.0],
            "sm-launch": [1.0, 3.0, 1.25],
        },
        "failure": {
            "torchrun": ["never", "never", None],
            "accelerate": ["never", "never", None],
            "ft_launcher 0.4": [9.04, 10.0, 11.0],
            "torchrun beside 0.7": ["never", "never", None],
            "ft_launcher 0.7": ["failed", "failed", "failed"],
            "sm-launch": [0.5, 0.25, 1.0],
        },
        "stop": {"torchrun": [0.9, 1.0, 1.1], "accelerate": ["never"] * 3, "sm-launch": [4, 5, 6]},
    },
}
# Ratios are medians of those of each round, which is not the ratio of the medians: 0.5, not 0.6.
TABLE = """\
| start to first all-reduce, 2 ranks | s | 2.50 (2.00-4.00) | - | 2.60 (2.20-3.00), failed in 1 \
| 3.00 (2.00-4.00) | 6.00 (6.00-6.00) | 1.25 (1.00-3.00) | |
| | of torchrun's | 1 | - | 1.15 (1.10-1.20) | 1.00 (0.80-1.50) | 2.00 (1.50-3.00) \
| 0.50 (0.50-0.75) | 1.00 / 0.60 |
| failure to last host down, no collective | s | never | never | 10.0 (9.04-11.0) | never | failed \
| 0.50 (0.25-1.00) | |
| | of torchrun's | never | never | < 0.50 (0.45-0.55) | never | failed | < 0.025 (0.013-0.050) | |
| SIGTERM to the ranks' handlers | ms | 1.00 (0.90-1.10) | never | - | - | - | 5.00 (4.00-6.00) | |
| | of torchrun's | 1 | never | - | - | - | 5.00 (4.44-5.45) | |
"""


def test_recorded_figures_become_a_table(tmp_path):
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps(RECORDED))
    done = completed(*BESIDE, "--read", recorded, timeout=60)
    assert done.stderr == ""
    about, table = done.stdout.split("\n\n")
    assert about == "\n".join(RECORDED["about"])
    head, rule, rows = table.split("\n", 2)
    ways = list(RECORDED["values"]["start-1x2"])
    assert head == f"| median (min-max) | | {' | '.join(ways)} | bound, cold / warm |"
    assert rule.count("|") == head.count("|")
    assert rows == TABLE


@pytest.mark.more
@pytest.mark.torch
def test_a_quick_look_leaves_no_process(tmp_path):
    """A start, the stop in it and a failure that torchrun never hears of, in namespaces."""
    written = tmp_path / "found.json"
    argv = [*BESIDE, "--figure", "start-1x2", "stop", "failure", "--of", "torchrun", "sm-launch"]
    argv += ["--rounds", "1", "--patience", "5", "--write", str(written)]
    done = completed(*argv, timeout=110)
    values = json.loads(written.read_text())["values"]
    assert list(values) == ["start-1x2", "stop", "failure"]
    assert values["failure"]["torchrun"] == ["never"], done.stderr
    del values["failure"]["torchrun"]
    numbers = [one for by_way in values.values() for way in by_way.values() for one in way]
    assert len(numbers) == 5 and all(number > 0 for number in numbers), done.stderr
