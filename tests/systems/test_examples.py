"""The documents' ways to train with several processes of one model: examples/systems."""

import re

import pytest
from conftest import SYSTEMS

pytestmark = pytest.mark.torch

HOSTS = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
ELSEWHERE = {"SM_CURRENT_HOST": "algo-2"}
NO_GPU = "DataParallel with 0 GPUs, which is the plain module: nothing runs in parallel; "
EXAMPLES = [
    # a script; as how many ranks (0: as plain Python starts it); what it prints
    ("average_gradients.py", 2, r"rank 1 of 2: loss 0\.\d+, the weights differ by "),
    ("data_parallel.py", 0, NO_GPU),
    ("data_parallel.py", 2, r"DistributedDataParallel with 2 process\(es\); "),
    ("parameter_server.py", 3, r"200 updates by 2 trainers: loss 0\."),
    ("collectives.py", 3, "rank 2 of 3: every value is right"),
    ("horovod_as_ddp.py", 2, r"^loss 0\.0\d* on rank 0 of 2\n$"),  # 5 with the weights 0
]
# What it needs: the variables, and the line with which it ends.
REFUSALS = [
    ("ranks_from_hosts.py", {}, "MASTER_ADDR is not set; start this script with sm-launch or t"),
    ("ranks_from_hosts.py", ELSEWHERE, "algo-2 is not one of ['algo-1']; check SM_CURRENT_HOST"),
    ("parameter_server.py", {}, "there is no trainer; expected 2 processes at least"),
    ("collectives.py", {}, "collectives.py needs two ranks or more: torchrun --nproc-p"),
    ("trainium.py", {}, "torch_xla is not installed here (No module named 'torch_xla');"),
]
# A script, what a mistake makes of a part of it, and what rank 1 says then.
MISTAKES = [
    ("average_gradients.py", "parameter.grad /= dist.get_world_size()", "pass", "expected 1e-06\n"),
    ("collectives.py", "send(torch.arange(3)", "send(torch.full((3,), 7)", "sent is [7, 7, 7]"),
]


@pytest.mark.parametrize(("script", "count", "says"), EXAMPLES)
def test_an_example_runs(ranks, script, count, says):
    done = ranks.run(SYSTEMS / script, count=count)
    assert done.codes == [0] * max(1, count), done.err
    assert re.search(says, done.out), done.out


@pytest.mark.parametrize(("script", "variables", "says"), REFUSALS)
def test_what_an_example_lacks_is_one_line(ranks, script, variables, says):
    done = ranks.run(SYSTEMS / script, count=len(variables), **{**HOSTS, **variables})
    assert done.codes == [1] and says in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(("name", "right", "wrong", "says"), MISTAKES)
def test_values_that_are_wrong_are_an_error(ranks, script, name, right, wrong, says):
    text = (SYSTEMS / name).read_text()
    assert text.count(right) == 1
    done = ranks.run(script(text.replace(right, wrong)), count=2)
    assert done.codes[1] == 1 and says in done.err, done.err


@pytest.mark.systems
def test_ranks_from_the_list_of_hosts_train_on_two_hosts(start_two):
    hosts = start_two("--train-script", SYSTEMS / "ranks_from_hosts.py", "--backend", "gloo")
    for number, host in enumerate(hosts):
        host.ends(0)
        assert re.search(rf"^rank {number} of 2: loss \S+ at first, 0\.\d+ at last$", host.out)
