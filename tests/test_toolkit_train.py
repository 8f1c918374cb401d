"""The real SageMaker toolkit: its `train` starts the launcher as the entry point, on two hosts."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import REPO, TRAIN_DDP, free_port

pytestmark = pytest.mark.torch


@pytest.fixture
def train(start, tmp_path):
    """Run `train` as two hosts, with a source folder that holds the launcher and a script."""

    def train(script: Path, **hyperparameters: object):
        port, peer_port, hosts = free_port(), free_port(), []
        for name in ("127.0.0.1", "127.0.0.2"):
            base = tmp_path / "ml" / name
            for folder in ("input/config", "output", "model", "source"):
                (base / folder).mkdir(parents=True)
            shutil.copytree(REPO / "launcher", base / "source" / "launcher")
            for file in script.parent.glob("*.py"):  # a source_dir: the script and its modules
                shutil.copy(file, base / "source")
            shutil.copy(script, base / "source" / "script.py")
            files = {
                "resourceconfig": {
                    "current_host": name,
                    "hosts": ["127.0.0.1", "127.0.0.2"],
                    "network_interface_name": "lo",
                },
                "hyperparameters": {
                    key: json.dumps(value)
                    for key, value in {
                        "train-script": "script.py",
                        "launcher-nproc-per-node": 2,
                        "launcher-rdzv-port": port,
                        "launcher-peer-port": peer_port,
                        "sagemaker_program": "launcher/__main__.py",
                        "sagemaker_submit_directory": str(base / "source"),
                        **hyperparameters,
                    }.items()
                },
                "inputdataconfig": {},
            }
            for file, value in files.items():
                (base / "input" / "config" / f"{file}.json").write_text(json.dumps(value))
            command = [os.path.join(os.path.dirname(sys.executable), "train")]
            environ = {"SAGEMAKER_BASE_DIR": str(base), "TRAINING_JOB_NAME": "job"}
            environ["AWS_DEFAULT_REGION"] = "us-east-1"  # boto3 asks for one
            hosts.append(start(host=name, command=command, **environ))
        return hosts

    return train


def test_two_hosts_train_to_the_end(train, tmp_path):
    first, second = train(TRAIN_DDP, epochs=2)
    for host in (first, second):
        assert host.wait() == 0, host.log()
        assert (tmp_path / "ml" / host.name / "output" / "success").exists()
    assert (tmp_path / "ml" / first.name / "model" / "model.pt").exists()
    assert not (tmp_path / "ml" / second.name / "model" / "model.pt").exists()
    assert "127.0.0.2 is node 1 of 2 in job job, with 2 process(es)" in second.err
    assert "GLOO_SOCKET_IFNAME=lo" in second.err


def test_a_script_that_raises_gives_our_first_line(train, script, tmp_path):
    path = script(
        "import os\nif os.environ['RANK'] in '13': raise ValueError('loss is nan')\n", "x.py"
    )
    hosts = train(path)
    assert [host.wait() for host in hosts] == [1, 1], hosts[0].log() + hosts[1].log()
    texts = {(tmp_path / "ml" / host.name / "output" / "failure").read_text() for host in hosts}
    (text,) = texts
    heads = [f"127.0.0.{n}, rank {2 * n - 1} (local rank 1) failed with " for n in (1, 2)]
    assert text.startswith(tuple(head + "ValueError: loss is nan\nexit code 1, " for head in heads))
