"""Two launchers as two hosts of one job, on loopback addresses, with real torch."""

import json
import re
import signal
import socket

import pytest
from conftest import ports

pytestmark = pytest.mark.torch

LEAVE_A_FILE = """
import os
names = ("GROUP_RANK", "RANK", "WORLD_SIZE", "SM_CURRENT_HOST", "MASTER_ADDR")
name = "rank-" + os.environ["RANK"]
open(name, "w").write(" ".join(os.environ[name] for name in names))
"""


def test_ranks_follow_the_sorted_hosts_of_the_chosen_group(start, script, tmp_path):
    """Whatever the order of the list; with a number of ranks for each, and no name of the job."""
    names = ["127.0.0.3", "127.0.0.2", "127.0.0.1"]
    groups = {"data": {"hosts": names[2:]}, "train": {"hosts": names[:2]}}
    common = {"SM_HOSTS": json.dumps(names), "SM_INSTANCE_GROUPS_DICT": json.dumps(groups)}
    common |= {**ports(), "TRAINING_JOB_NAME": "", "SAGEMAKER_JOB_NAME": ""}
    options = ("--train-script", script(LEAVE_A_FILE), "--launcher-instance-groups", "train")
    hosts = [
        start(*options, **common, SM_CURRENT_HOST=name, LAUNCHER_NPROC_PER_NODE=name[-1])
        for name in names
    ]
    for host in hosts:
        host.ends(0)
    second, first = names[:2]
    # What each rank left: node rank, rank, world size, host, master.
    assert {path.name: path.read_text().split() for path in tmp_path.glob("rank-*")} == {
        "rank-0": ["0", "0", "5", first, first],
        "rank-1": ["0", "1", "5", first, first],
        "rank-2": ["1", "2", "5", second, first],
        "rank-3": ["1", "3", "5", second, first],
        "rank-4": ["1", "4", "5", second, first],
    }
    assert "127.0.0.3 has node_rank 1 (nnodes=2)" in hosts[0].err
    assert "127.0.0.1 is in none of the instance groups train" in hosts[2].err


SAVES = """
import os, signal, sys, time

def save(*_):
    time.sleep(3 * int(os.environ["RANK"]))
    print("saved", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
print("runs", flush=True)
time.sleep(600)
"""


def test_a_stop_on_one_host_stops_both_and_leaves_the_store_to_the_last(start_two, script):
    """torchrun logged a stack trace for each sign of life that it could not leave in the store."""
    hosts = start_two("--train-script", script(SAVES), PET_RDZV_CONF="keep_alive_interval=1")
    for host in hosts:
        host.wait_for("runs")
    hosts[1].signal(signal.SIGTERM)
    for host in hosts:
        host.ends(143)
        assert "saved" in host.out
        assert "TCPStore" not in host.err and "keep-alive" not in host.err, host.log()
        assert "SIGTERM (signal 15): stopping; the ranks of" in host.err
        assert f"launcher: {host.name}: stopped by SIGTERM (signal 15); " in host.err
        assert re.search(r"training \S+ s, saving \S+ s\.$", host.err, re.M)
        assert "did not handle" not in host.err


@pytest.mark.parametrize("address", ["127.0.0.1", "::"])
def test_a_rendezvous_port_that_is_taken_ends_both_before_torchrun(start_two, script, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, dualstack_ipv6=":" in address) as taken:
        port = str(taken.getsockname()[1])
        hosts = start_two("--train-script", script("print('ran')"), LAUNCHER_RDZV_PORT=port)
        says = (
            f"launcher: 127.0.0.1: the rendezvous port of 127.0.0.1:{port} is already in use on "
            "this host; choose another with --launcher-rdzv-port, the same one on every host.\n"
        )
        for host in hosts:
            assert host.wait() == 2, host.log()
            assert host.failure == says and host.out == ""
