"""The engine that the tests start where none runs."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

SCRIPT = """
import subprocess, sys
sys.path.insert(0, "tests")
from cluster.engine import remove_rules_of_lost_bridges
def run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
run("ip", "link", "add", "br-00112233aabb", "type", "bridge")
for bridge in ("br-00112233aabb", "br-00112233ffff", "docker0"):
    nat = ("-t", "nat", "-A", "POSTROUTING", "-s", "172.18.0.0/16")
    run("iptables", "--wait", *nat, "!", "-o", bridge, "-j", "MASQUERADE")
    run("iptables", "--wait", "-A", "FORWARD", "-i", bridge, "-o", bridge, "-j", "ACCEPT")
remove_rules_of_lost_bridges()
print(run("iptables-save"))
"""


@pytest.mark.containers
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("iptables"), reason="needs root and iptables"
)
def test_rules_that_a_killed_engine_has_left_go():
    command = ["unshare", "--net", sys.executable, "-c", SCRIPT]
    left = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    assert left.count("br-00112233aabb") == 3
    assert "br-00112233ffff" not in left
    assert "docker0" not in left
