"""Two launchers as two hosts of one job, on loopback addresses, with real torch."""

import json
import os
import re
import signal
import socket
import time

import psutil
import pytest
from conftest import TRAIN_DDP, more, poll, ports

pytestmark = pytest.mark.torch

TWO_RANKS = ("--launcher-nproc-per-node", "2")
LEAVE_A_FILE = """
import os
names = ("GROUP_RANK", "RANK", "WORLD_SIZE", "SM_CURRENT_HOST", "MASTER_ADDR")
name = "rank-" + os.environ["RANK"]
open(name, "w").write(" ".join(os.environ[name] for name in names))
"""


def ranks(folder):
    """Return what each rank left: {rank: [node rank, rank, world size, host, master]}."""
    files = {path.name: path.read_text().split() for path in folder.glob("rank-*")}
    return dict(sorted(files.items()))


def succeed(*hosts):
    for host in hosts:
        assert host.wait() == 0, host.log()
        assert host.failure is None
        assert host.leftovers() == []


# Runs the reference script as it is, and leaves a digest of each rank's weights.
WITH_DIGEST = f"""
import hashlib, os, sys
sys.path.insert(0, {str(TRAIN_DDP.parent)!r})
import train_ddp

train = train_ddp.train

def train_and_tell(args, device):
    model = train(args, device)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    open("rank-" + os.environ["RANK"], "w").write(digest.hexdigest())
    return model

train_ddp.train = train_and_tell
train_ddp.main()
"""


def test_two_hosts_train_one_model(start_two, script, tmp_path):
    path = script(WITH_DIGEST)
    hosts = start_two("--train-script", path, "--epochs", "4", *TWO_RANKS, SM_MODEL_DIR="model")
    succeed(*hosts)
    digests = ranks(tmp_path)
    assert list(digests) == ["rank-0", "rank-1", "rank-2", "rank-3"]
    assert len({str(digest) for digest in digests.values()}) == 1  # the same to the last bit

    import torch  # here, so that tests without torch can be collected

    weights = torch.load(tmp_path / "model" / "model.pt", weights_only=True)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(2, 64), torch.nn.ReLU()),
        *(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)),
    )
    model.load_state_dict(weights)
    points = torch.rand(2000, 2) * 4 - 2
    angle = torch.atan2(points[:, 1], points[:, 0]) + 2 * points.norm(dim=1)
    accuracy = (model(points).argmax(1) == (torch.sin(angle) > 0)).float().mean().item()
    assert accuracy > 0.9  # half of it is chance


def test_ranks_follow_the_sorted_hosts_even_if_the_list_is_not(start_two, script, tmp_path):
    hosts = start_two(
        "--train-script", script(LEAVE_A_FILE), *TWO_RANKS, SM_HOSTS='["127.0.0.2", "127.0.0.1"]'
    )
    succeed(*hosts)
    first, second = "127.0.0.1", "127.0.0.2"
    assert ranks(tmp_path) == {
        "rank-0": ["0", "0", "4", first, first],
        "rank-1": ["0", "1", "4", first, first],
        "rank-2": ["1", "2", "4", second, first],
        "rank-3": ["1", "3", "4", second, first],
    }
    assert "127.0.0.2 is node 1 of 2" in hosts[1].err


def test_an_empty_job_name_does_not_keep_hosts_apart(start_two, script, tmp_path):
    path = script(LEAVE_A_FILE)
    succeed(*start_two("--train-script", path, TRAINING_JOB_NAME="", SAGEMAKER_JOB_NAME=""))
    assert [left[2] for left in ranks(tmp_path).values()] == ["2", "2"]


def test_hosts_with_different_numbers_of_processes(start, script, tmp_path):
    common = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', **ports()}
    hosts = [
        start(
            *("--train-script", script(LEAVE_A_FILE)),
            **{**common, "SM_CURRENT_HOST": name, "LAUNCHER_NPROC_PER_NODE": count},
        )
        for name, count in (("127.0.0.1", "1"), ("127.0.0.2", "2"))
    ]
    succeed(*hosts)
    assert [left[0] for left in ranks(tmp_path).values()] == ["0", "1", "1"]


def test_only_the_chosen_instance_group_takes_part(start, script, tmp_path):
    groups = {"data": {"hosts": ["127.0.0.1"]}, "train": {"hosts": ["127.0.0.2", "127.0.0.3"]}}
    names = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    common = ports()
    hosts = [
        start(
            *("--train-script", script(LEAVE_A_FILE), "--launcher-instance-groups", "train"),
            SM_HOSTS=json.dumps(names),
            SM_CURRENT_HOST=name,
            SM_INSTANCE_GROUPS_DICT=json.dumps(groups),
            **common,
        )
        for name in names
    ]
    succeed(*hosts)
    assert [left[3] for left in ranks(tmp_path).values()] == names[1:]
    assert "127.0.0.1 is in none of the instance groups train" in hosts[0].err


def test_images_without_the_toolkit(start, script, tmp_path):
    path = script(
        LEAVE_A_FILE + "open(name, 'a').write(' ' + os.environ['SM_HP_EPOCHS'])\n"
        "import sys; print(sys.argv[1:])"
    )
    (port, peer_port), hosts = ports().values(), []
    for name in ("127.0.0.1", "127.0.0.2"):
        folder = tmp_path / name / "input" / "config"
        folder.mkdir(parents=True)
        files = {
            "resourceconfig": {"current_host": name, "hosts": ["127.0.0.1", "127.0.0.2"]},
            "hyperparameters": {
                "train-script": json.dumps(str(path)),
                "launcher-rdzv-port": port,
                "launcher-peer-port": peer_port,
                "epochs": "3",
                "sagemaker_region": '"x"',
            },
            "inputdataconfig": {},
        }
        for file, value in files.items():
            (folder / f"{file}.json").write_text(json.dumps(value))
        hosts.append(start("train", host=name, SAGEMAKER_BASE_DIR=str(tmp_path / name)))
    succeed(*hosts)
    assert [left[3:] for left in ranks(tmp_path).values()] == [
        ["127.0.0.1", "127.0.0.1", "3"],
        ["127.0.0.2", "127.0.0.1", "3"],
    ]
    assert hosts[0].out == "['--epochs', '3']\n"


ROUNDS = """
import os, sys, time
host = os.environ["SM_CURRENT_HOST"]
with open("rounds-" + host, "a") as file:
    file.write("x")
number = len(open("rounds-" + host).read()) - 1  # this host's rounds so far
print("round", number, flush=True)
if (number, host) in ((0, "127.0.0.2"), (1, "127.0.0.1")):
    time.sleep(1)
    sys.exit(9)
time.sleep(6 if number == 2 else 100)
"""


def test_a_restart_for_another_hosts_sake_is_no_failure(start_two, script):
    # Each host fails once, and both start again each time.
    options = ("--launcher-max-restarts", "2", "--launcher-failure-grace", "2")
    first, second = start_two("--train-script", script(ROUNDS), *options)
    assert first.wait() == 0, first.log() + second.log()
    assert second.wait() == 0, second.log()
    assert first.out == second.out == "round 0\nround 1\nround 2\n"


FAIL_ON = """
import os, sys, time
print("runs", flush=True)
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(0.5)
    exec(sys.argv[2])
time.sleep(600)
"""


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("raise ValueError('loss is nan')", 1, "failed with ValueError: loss is nan"),
        more("sys.exit(3)", 3, "ended with exit code 3"),
        more("os.kill(os.getpid(), 11)", 139, "was killed by SIGSEGV (signal 11)"),
    ],
)
def test_a_failure_on_one_host_ends_both_with_one_text(start_two, script, rank, what, code, said):
    hosts = start_two("--train-script", script(FAIL_ON), *TWO_RANKS, str(rank), what)
    texts = set()
    for host in hosts:
        assert host.wait(60) == code, host.log()
        texts.add(host.failure)
        assert host.leftovers() == []
    (text,) = texts
    assert text.startswith(f"127.0.0.{rank // 2 + 1}, rank {rank} (local rank {rank % 2}) {said}\n")


def test_the_other_host_has_its_failure_grace(start_two, script):
    deaf = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('hears', flush=True))\n"
    path = script(deaf + FAIL_ON)
    options = ("--launcher-failure-grace", "2")
    first, second = start_two("--train-script", path, *options, "1", "sys.exit(3)")
    assert (first.wait(60), second.wait(60)) == (3, 3), first.log()
    assert "hears" in first.out and "ranks still run at the end of their grace" in first.err


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_is_killed_is_a_host_that_is_lost(start_two, script, lost):
    hosts = start_two("--train-script", script(FAIL_ON), "9", "")
    for host in hosts:
        host.wait_for("runs")
    hosts[lost].signal(signal.SIGKILL)
    left = hosts[1 - lost]
    assert left.wait(60) == 69, left.log()
    assert left.failure.startswith(f"{hosts[lost].name} was lost: its launcher died\n")
    assert left.leftovers() == []
    poll(lambda: not hosts[lost].processes())


@pytest.mark.parametrize("told", [0, 1])
def test_a_stop_on_one_host_stops_both(start_two, script, told):
    hosts = start_two("--train-script", script(FAIL_ON), "9", "")
    for host in hosts:
        host.wait_for("runs")
    hosts[told].signal(signal.SIGTERM)
    for host in hosts:
        assert host.wait(60) == 143, host.log()
        assert host.failure is None
        assert "SIGTERM (signal 15): stopping; the ranks of" in host.err
        assert f"launcher: {host.name}: stopped by SIGTERM (signal 15); joining " in host.err


def test_hosts_that_succeed_leave_together(start_two, script):
    late = "import os, time\nif os.environ['RANK'] == '1': time.sleep(4)\n"
    path = script(late + "print('through', flush=True)")
    first, second = start_two("--train-script", path)
    first.wait_for("through")
    assert "through" not in second.out
    (agent,) = psutil.Process(first.process.pid).children()  # in torchrun's barrier at its end
    assert agent.environ()["LAUNCHER_EXIT_BARRIER"] == "1728000"  # s; the next test shows why
    succeed(first, second)
    assert "through" in second.out
    for host in (first, second):
        last = host.err.splitlines()[-1]
        assert re.fullmatch(ENDED.format(host.name), last), last


ENDED = r"launcher: {}: every rank succeeded; joining \S+ s, start \S+ s, training \S+ s\."


def test_the_log_of_a_job_that_fails_ends_with_the_cause_and_the_times(start_two, script):
    hosts = start_two("--train-script", script("raise SystemExit(3)"), LAUNCHER_VERBOSE="true")
    for host in hosts:
        assert host.wait(60) == 3, host.log()
        cause, times = host.err.splitlines()[-2:]
        assert cause == f"launcher: {host.failure.splitlines()[0]}"
        assert times.startswith(f"launcher: {host.failure.splitlines()[1]}; {host.name}: joining ")
        assert re.search(r"^launcher: \S+ s: run Joining to Running on start", host.err, re.M)


def test_torchruns_barrier_if_it_is_short(start_two, script):
    """What the 300 s of torchrun's own would do to a healthy host, and that they are changed."""
    # The second one's torchrun ends its rank because the store is gone: that is no cause.
    handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    path = script(handler + "import os, time\nif os.environ['RANK'] == '1': time.sleep(600)\n")
    hosts = start_two("--train-script", path, LAUNCHER_EXIT_BARRIER="2")
    for host in hosts:
        assert host.wait(60) == 69, hosts[0].log() + hosts[1].log()
        says = "127.0.0.2: the hosts did not all meet at 127.0.0.1:"
        assert host.failure.startswith(says), host.failure


# Holds the second host's torchrun up behind the barrier at its end, before it leaves the store.
LEAVES_LATE = """
import logging, os, time

def late(record):
    if os.environ.get("SM_CURRENT_HOST") == "127.0.0.2" and "Done waiting" in record.msg:
        print("leaves late", flush=True)
        time.sleep({seconds})
    return True

logging.getLogger("torch.distributed.elastic.agent.server.api").addFilter(late)
"""


def hold_up_the_second(start_two, script, tmp_path, seconds):
    """Start two hosts, of which the second one leaves torchrun's store so much later."""
    (tmp_path / "late").mkdir()
    script(LEAVES_LATE.format(seconds=seconds), "late/sitecustomize.py")
    path = os.pathsep.join([str(tmp_path / "late"), os.environ.get("PYTHONPATH", "")])
    hosts = start_two("--train-script", script(""), LOGLEVEL="INFO", PYTHONPATH=path)
    hosts[1].wait_for("leaves late")
    return hosts


def test_the_first_host_keeps_torchruns_store_until_all_have_left(start_two, script, tmp_path):
    """Without this torchrun logged an error and a stack trace at the end of every sixth job."""
    first, second = hold_up_the_second(start_two, script, tmp_path, 1)
    succeed(first, second)
    for host in (first, second):
        assert "Done waiting for other agents" in host.err  # and then for their leaving
        assert "TCPStore" not in host.err and "failed to shutdown" not in host.err, host.log()


def test_a_host_that_is_killed_before_it_leaves_is_not_waited_for(start_two, script, tmp_path):
    first, second = hold_up_the_second(start_two, script, tmp_path, 600)
    for process in second.processes():
        process.kill()
    assert first.wait(10) == 0, first.log()  # all ranks of both hosts have succeeded


def test_a_stop_while_the_first_host_waits_for_all_to_leave(start_two, script, tmp_path):
    hosts = hold_up_the_second(start_two, script, tmp_path, 600)
    poll(lambda: "Done waiting for other agents" in hosts[0].err)
    for host in hosts:
        host.signal(signal.SIGTERM)
    for host in hosts:
        assert host.wait(60) == 0, host.log()  # all ranks of both hosts have succeeded


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


def test_a_host_that_saves_longer_than_the_first_does_not_miss_the_store(start_two, script):
    """torchrun logged a stack trace for each sign of life that it could not leave in the store."""
    hosts = start_two("--train-script", script(SAVES), PET_RDZV_CONF="keep_alive_interval=1")
    for host in hosts:
        host.wait_for("runs")
    hosts[0].signal(signal.SIGTERM)
    for host in hosts:
        assert host.wait(60) == 143, host.log()
        assert "saved" in host.out
        assert "TCPStore" not in host.err and "keep-alive" not in host.err, host.log()


def test_a_stop_while_one_host_waits_for_the_other(start_two, script):
    late = "import os, time\nif os.environ['RANK'] == '1': time.sleep(600)\n"
    path = script("print('runs', flush=True)\n" + late)
    first, second = start_two("--train-script", path)
    second.wait_for("runs")
    first.wait_for("runs")
    first.signal(signal.SIGTERM)
    assert (first.wait(60), second.wait(60)) == (143, 143), first.log() + second.log()


def test_a_missing_host_is_named(start_two, script):
    three = '["127.0.0.1", "127.0.0.2", "127.0.0.3"]'
    options = ("--launcher-start-timeout", "3")
    hosts = start_two("--train-script", script(""), *options, SM_HOSTS=three)
    for host in hosts:
        assert host.wait(60) == 69, host.log()
        assert host.failure.startswith("127.0.0.3 did not arrive within 3 s\n")


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("what", ["its script", "its ports"])
def test_a_configuration_error_on_one_host_ends_both(start, script, wrong, what):
    names = ("127.0.0.1", "127.0.0.2")
    common = {"SM_HOSTS": json.dumps(names), **ports()}
    paths, own = [script(""), script("")], [{}, {}]
    if what == "its script":
        paths[wrong] = "no-such.py"
        says = "--train-script no-such.py: there is neither "
    else:
        port = common["LAUNCHER_PEER_PORT"]
        own[wrong] = {"LAUNCHER_RDZV_PORT": port}
        says = f"--launcher-rdzv-port and --launcher-peer-port are both {port}; "
    hosts = []
    for i in (wrong, 1 - wrong):  # the other one starts a second later
        environ = {**common, "SM_CURRENT_HOST": names[i], **own[i]}
        hosts.append(start("--train-script", paths[i], **environ))
        time.sleep(1)
    for host in hosts:
        assert host.wait(60) == 2, host.log()
        assert host.failure.startswith(f"launcher: {names[wrong]}: {says}")


@pytest.mark.parametrize("address", ["127.0.0.1", "::"])
def test_a_rendezvous_port_that_is_taken_ends_both_before_torchrun(start_two, script, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, dualstack_ipv6=":" in address) as taken:
        port = str(taken.getsockname()[1])
        hosts = start_two("--train-script", script("print('ran')"), LAUNCHER_RDZV_PORT=port)
        for host in hosts:
            assert host.wait(60) == 2, host.log()
            assert host.failure == (
                f"launcher: 127.0.0.1: the rendezvous port of 127.0.0.1:{port} is taken on this "
                "host; choose another with --launcher-rdzv-port, the same one on every host.\n"
            )
            assert host.out == ""


def test_arguments_that_differ_end_all_even_a_late_host(start, script):
    common = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2", "127.0.0.3"]', **ports()}
    hosts = []
    for name, lr in (("127.0.0.1", "0.1"), ("127.0.0.2", "0.2"), ("127.0.0.3", "0.1")):
        if name == "127.0.0.3":
            time.sleep(1)
        argv = ("--train-script", script(""), "--lr", lr)
        hosts.append(start(*argv, SM_CURRENT_HOST=name, **common))
    for host in hosts:
        assert host.wait(60) == 2, host.log()
        assert host.failure == (
            "launcher: 127.0.0.1 and 127.0.0.2 differ in their script's arguments: "
            "['--lr', '0.1'] and ['--lr', '0.2']; expected the same on every host.\n"
        )


def test_without_peers_no_port_is_opened(start_two, script, tmp_path):
    hosts = start_two("--train-script", script(LEAVE_A_FILE), "--launcher-peers", "false")
    succeed(*hosts)
