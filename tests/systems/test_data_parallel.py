"""The documents' ways to train with several processes of one model: examples/systems."""

import re

import pytest
from conftest import SYSTEMS

pytestmark = pytest.mark.torch

TWO_RANKS = ("--launcher-nproc-per-node", "2")


def test_gradients_averaged_by_hand_give_the_weights_of_ddp(ranks):
    done = ranks.run(SYSTEMS / "average_gradients.py", count=2)
    assert done.codes == [0, 0], done.err
    seen = re.findall(r"rank (\d) of (\d): loss 0\.\d+, the weights differ by (\S+)", done.out)
    assert sorted(rank for rank, _, _ in seen) == ["0", "1"]
    assert all(float(difference) <= 1e-6 for _, _, difference in seen)


def test_weights_that_differ_are_an_error(ranks, script):
    text = (SYSTEMS / "average_gradients.py").read_text()
    wrong = text.replace("parameter.grad /= dist.get_world_size()", "pass")
    assert wrong != text
    done = ranks.run(script(wrong), count=2)
    assert done.codes == [1, 1] and done.err.count("expected 1e-06\n") == 2


@pytest.mark.systems
def test_ranks_from_the_list_of_hosts_train_on_two_hosts(start_two):
    hosts = start_two("--train-script", SYSTEMS / "ranks_from_hosts.py", "--backend", "gloo")
    for number, host in enumerate(hosts):
        assert host.wait() == 0, host.log()
        assert re.search(rf"^rank {number} of 2: loss \S+ at first, 0\.\d+ at last$", host.out)
        assert host.leftovers() == []


@pytest.mark.parametrize(
    ("count", "variables", "says"),
    [
        (0, {}, "MASTER_ADDR is not set; start this script with sm-launch or torchrun"),
        (
            1,
            {"SM_CURRENT_HOST": "algo-2"},
            "algo-2 is not one of ['algo-1']; check SM_CURRENT_HOST",
        ),
    ],
)
def test_ranks_from_the_list_of_hosts_need_a_launcher_and_the_list(ranks, count, variables, says):
    variables = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", **variables}
    done = ranks.run(SYSTEMS / "ranks_from_hosts.py", count=count, **variables)
    assert (done.codes, done.err) == ([1], f"ranks_from_hosts.py: {says}\n")


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (0, "DataParallel with 0 GPUs, which is the plain module: nothing runs in parallel; "),
        (2, "DistributedDataParallel with 2 process(es); "),
    ],
)
def test_data_parallel_and_ddp_train_as_one_device_does(ranks, count, says):
    done = ranks.run(SYSTEMS / "data_parallel.py", count=count)
    assert done.codes == [0] * max(1, count), done.err
    assert done.out.count(says) == max(1, count)


def test_a_server_and_trainers(ranks):
    done = ranks.run(SYSTEMS / "parameter_server.py", count=3)
    assert done.codes == [0, 0, 0], done.err
    assert "200 updates by 2 trainers: loss 0." in done.out
    alone = ranks.run(SYSTEMS / "parameter_server.py")
    assert (alone.codes, alone.err) == (
        [1],
        "parameter_server.py: there is no trainer; expected 2 processes at least\n",
    )
