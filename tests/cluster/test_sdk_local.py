"""examples/sagemaker in local mode: the real SDKs start real containers with docker-compose."""

import os
import shlex
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sdk
from aws import Aws
from conftest import TRAIN_DDP, poll

from cluster import engine
from cluster.hosts import CONTAINERS

# Beside much else an SDK's own steps take minutes. The first limit counts.
LIMIT = pytest.mark.timeout(2000, func_only=True)
# One at a time: all have a network of the same name, and hosts of v3 have the same names on it.
pytestmark = [LIMIT, *CONTAINERS, pytest.mark.xdist_group("sdk")]

NETWORK = "sagemaker-local"
DDP = ("train-script=train_ddp.py", "epochs=1", "samples=512")
ENDLESS = ("--train-script", "train_ddp.py", "--epochs", "100000", "--samples", "64")

# What an SDK runs: docker-compose -f FILE up ... With this in front, the hosts have a label by
# which the tests find them, and what a test lends them.
COMPOSE = """#!{python}
import os, sys, yaml
file = sys.argv[sys.argv.index("-f") + 1]
with open(file) as stream:
    content = yaml.safe_load(stream)
for host in content["services"].values():
    for section, lines in {lent}.items():
        host[section] = [*host.get(section, []), *lines]
with open(file, "w") as stream:
    yaml.safe_dump(content, stream)
os.execvp({compose}[0], [*{compose}, *sys.argv[1:]])
"""
DOCKER = '#!/bin/sh\n[ "$1" != compose ] || exit 1\nexec {docker} "$@"\n'


class Local:
    """Jobs on this machine: examples are started, their containers found, and both removed."""

    def __init__(self, client, folder, aws, data):
        self.folder = folder
        self._client = client
        self._label = f"{engine.LABEL}={os.getpid()}"
        self._data = str(data)
        self._env = sdk.environment(aws, folder)
        self._env["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.process = None

    def start(self, name, image, *args):
        real, compose = shutil.which("docker"), shutil.which("docker-compose")
        command = [compose] if compose else [real, "compose"]
        # Threads that wait sleep, as in the other tests: these hosts share a machine.
        environment = ["OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=passive"]
        lent = {"environment": environment, "labels": [self._label]}
        values = {"python": sdk.python(name[-2:]), "lent": lent}
        folder = self.folder / "bin"
        folder.mkdir()
        (folder / "docker-compose").write_text(COMPOSE.format(compose=command, **values))
        (folder / "docker").write_text(DOCKER.format(docker=shlex.quote(real)))
        for path in folder.iterdir():
            path.chmod(0o755)
        where = "--image" if "own_image" in name else "--local"
        words = (f"{name}.py", where, image, "--data", self._data, *args)
        self.process = sdk.start(*words, env=self._env, cwd=self.folder)

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def containers(self):
        return self._client.containers.list(all=True, filters={"label": self._label})

    def stop(self):
        """Stop all hosts as SageMaker does; return their exit codes."""
        hosts = self.containers()
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(lambda host: host.stop(timeout=60), hosts))
            return [done["StatusCode"] for done in pool.map(lambda host: host.wait(), hosts)]

    def hosts_log(self):
        """Return what the hosts wrote: compose shows nothing of them once the first has ended."""
        return "".join(host.logs().decode() for host in self.containers())

    def members(self, name):
        """Return the files, by their names, in the only archive of that name that the SDK made."""
        (path,) = self.folder.glob(f"run-*/**/{name}")
        with tarfile.open(path) as archive:
            files = (member for member in archive if member.isfile())
            return {file.name: archive.extractfile(file).read() for file in files}

    def remove(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for container in self.containers():
            container.remove(force=True, v=True)
        for network in self._client.networks.list(names=[NETWORK], greedy=True):
            if not network.attrs["Containers"]:  # of somebody's own
                network.remove()


@pytest.fixture
def local(client, tmp_path, ants_and_bees):
    """Run examples: local.start(NAME, IMAGE, *ARGUMENTS). It needs nothing of AWS."""
    aws = Aws()
    sdk.make_source(tmp_path, *TRAIN_DDP.parent.glob("*.py"))
    with engine.locked(NETWORK):
        local = Local(client, tmp_path, aws, ants_and_bees)
        yield local
        local.remove()
    aws.stop()
    assert [request.action for request in aws.requests] == []
    assert os.listdir(os.environ["TMPDIR"]) == []


TRAINED = [
    ("hymenoptera_v2", "aws_image"),  # which has the toolkit and torch, and nothing of ours
    ("hymenoptera_v3", "aws_image"),
    ("own_image_v2", "image"),  # the script is one of the image's own
    ("own_image_v3", "image"),
]


@pytest.mark.parametrize(("name", "which_image"), TRAINED, indirect=["which_image"])
def test_two_hosts_train(local, name, which_image):
    local.start(name, which_image, *DDP)
    assert local.process.wait(900) == 0, local.log
    log = local.hosts_log()
    assert log.count("has node_rank 1 (nnodes=2) in job") == 1, log
    assert log.count(": every rank succeeded") == 2, log
    assert "model.pt" in local.members("model.tar.gz")


FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""


def test_a_failure_under_v3(local, image):
    """The SDK's own error has the exit code alone; the log and the failure file have the cause."""
    (local.folder / "src" / "train.py").write_text(FAILS)
    local.start("hymenoptera_v3", image, "train-script=train.py")
    assert local.process.wait(900) == 1, local.log
    assert "Process exited with code: 3" in " ".join(local.log.split()), local.log
    files = {Path(name).name: text for name, text in local.members("output.tar.gz").items()}
    first = files["failure"].decode().splitlines()[0]
    says = "rank 1 (local rank 0) ended with exit code 3"
    assert first.startswith("algo-2") and first.endswith(says)
    assert local.hosts_log().count(first) == 2, local.log  # each host says it


def test_a_stop_of_v3_in_awss_image(local, aws_image):
    """The launcher's init takes the place of the SDK's shell, which is PID 1 there."""
    local.start("spot_v3", aws_image, *ENDLESS, "--checkpoints", "s3://bucket/not-used")
    poll(lambda: "epoch=0 " in local.log or local.process.poll() is not None, 900)
    assert local.stop() == [143, 143], local.log
    assert local.process.wait(900) == 1, local.log
    assert "stopped by SIGTERM; saved /opt/ml/checkpoints/" in local.hosts_log()
