"""Two launchers as two hosts of one job, on loopback addresses, with real torch."""

import json

import pytest
from conftest import TRAIN_DDP, free_port

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
    common = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "LAUNCHER_RDZV_PORT": str(free_port())}
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
    port = str(free_port())
    hosts = [
        start(
            *("--train-script", script(LEAVE_A_FILE), "--launcher-instance-groups", "train"),
            SM_HOSTS=json.dumps(names),
            SM_CURRENT_HOST=name,
            SM_INSTANCE_GROUPS_DICT=json.dumps(groups),
            LAUNCHER_RDZV_PORT=port,
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
    port, hosts = free_port(), []
    for name in ("127.0.0.1", "127.0.0.2"):
        folder = tmp_path / name / "input" / "config"
        folder.mkdir(parents=True)
        files = {
            "resourceconfig": {"current_host": name, "hosts": ["127.0.0.1", "127.0.0.2"]},
            "hyperparameters": {
                "train-script": json.dumps(str(path)),
                "launcher-rdzv-port": str(port),
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
    # Each host fails once. A host that restarts because the other failed ends its ranks with
    # SIGTERM and spends no restart, so its last one may be spent by then.
    options = ("--launcher-max-restarts", "1", "--launcher-failure-grace", "2")
    first, second = start_two("--train-script", script(ROUNDS), *options)
    assert first.wait() == 0, first.log() + second.log()
    assert second.wait() == 0, second.log()
    assert first.out == second.out == "round 0\nround 1\nround 2\n"
