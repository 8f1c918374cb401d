"""examples/sagemaker in local mode: the real SDKs start real containers with docker-compose."""

import importlib.util
import os
import shlex
import shutil
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sdk
from aws import Aws
from conftest import TRAIN_DDP, TRAIN_HYMENOPTERA, more, poll

from cluster import engine
from cluster.hosts import CONTAINERS

# One at a time: all have a network of the same name, and hosts of v3 have the same names on it.
pytestmark = [*CONTAINERS, pytest.mark.xdist_group("sdk")]
pytestmark += [pytest.mark.timeout(600)]
versions = pytest.mark.parametrize("version", sdk.VERSIONS)

NETWORK = "sagemaker-local"
SMALL = ("weights=none", "image-size=64", "batch-size=4", "epochs=1")
DDP = ("train-script=train_ddp.py", "epochs=1", "samples=512")
CHECKPOINTS = ("--checkpoints", "s3://bucket/not-used")

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

    def __init__(self, client, folder, aws):
        self.folder = folder
        # Threads that wait sleep, as in the other tests: these hosts share a machine.
        environment = ["OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=passive"]
        label = f"{engine.LABEL}={os.getpid()}"
        self.lent = {"environment": environment, "labels": [label], "volumes": []}
        self._client = client
        self._label = label
        self._env = sdk.environment(aws, folder)
        self._env["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
        self._process = None

    def start(self, name, *args):
        real, compose = shutil.which("docker"), shutil.which("docker-compose")
        command = [compose] if compose else [real, "compose"]
        values = {"python": sdk.python(Path(name).stem[-2:]), "lent": self.lent}
        folder = self.folder / "bin"
        folder.mkdir()
        (folder / "docker-compose").write_text(COMPOSE.format(compose=command, **values))
        (folder / "docker").write_text(DOCKER.format(docker=shlex.quote(real)))
        for path in folder.iterdir():
            path.chmod(0o755)
        self._process = sdk.start(name, *args, env=self._env, cwd=self.folder)

    def wait(self):
        """Wait until the SDK has ended; return its exit code."""
        return self._process.wait(300)

    def ended(self):
        return self._process.poll() is not None

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def containers(self):
        return self._client.containers.list(all=True, filters={"label": self._label})

    def stop(self, limit):
        """Stop all hosts as SageMaker does; return their exit codes."""
        hosts = self.containers()
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(lambda host: host.stop(timeout=limit), hosts))
            return [done["StatusCode"] for done in pool.map(lambda host: host.wait(), hosts)]

    def hosts_log(self):
        """Return what the hosts wrote: compose shows nothing of them once the first has ended."""
        return "".join(host.logs().decode() for host in self.containers())

    def archive(self, name):
        """Return the path of the only archive of that name that the SDK has made."""
        (path,) = self.folder.glob(f"run-*/**/{name}")
        return path

    def members(self, name):
        """Return the files in an archive, by their names."""
        with tarfile.open(self.archive(name)) as archive:
            files = (member for member in archive if member.isfile())
            return {file.name: archive.extractfile(file).read() for file in files}

    def remove(self):
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for container in self.containers():
            container.remove(force=True, v=True)
        for network in self._client.networks.list(names=[NETWORK], greedy=True):
            if not network.attrs["Containers"]:  # of somebody's own
                network.remove()


@pytest.fixture
def local(client, tmp_path):
    """Run examples here: local.start(NAME, *ARGUMENTS), local.wait(). It needs nothing of AWS."""
    aws = Aws()
    with engine.locked(NETWORK):
        local = Local(client, tmp_path, aws)
        yield local
        local.remove()
    aws.stop()
    assert [request.action for request in aws.requests] == []
    assert os.listdir(os.environ["TMPDIR"]) == []


@pytest.fixture
def torchvision(local):
    """Lend the hosts this environment's packages, as add_torchvision does."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" != engine.DEBIAN_PYTHON:
        pytest.skip(f"for the image's Python, {engine.DEBIAN_PYTHON}, pip would need several GB")
    packages = Path(importlib.util.find_spec("torchvision").origin).parent.parent
    local.lent["volumes"].append(f"{packages}:/opt/packages:ro")
    local.lent["environment"].append("PYTHONPATH=/opt/packages")


def arguments(name, image):
    return ("--image" if "own_image" in name else "--local", image)


@pytest.fixture
def trained(local, ants_and_bees):
    """Train in two hosts to the end; return the files in the model's archive."""

    def trained(name, image, *hyperparameters):
        data = ("--data", str(ants_and_bees))
        local.start(name, *arguments(name, image), *data, *hyperparameters)
        assert local.wait() == 0, local.log
        log = local.hosts_log()
        assert log.count("has node_rank 1 (nnodes=2) in job") == 1, log
        assert log.count(": every rank succeeded") == 2, log
        return local.members("model.tar.gz")

    return trained


@versions
def test_launcher_and_script_in_awss_image(local, trained, aws_image, version):
    """The image has the toolkit and torch, and nothing of ours."""
    sdk.make_source(local.folder, *TRAIN_DDP.parent.glob("*.py"))
    assert "model.pt" in trained(f"hymenoptera_{version}.py", aws_image, *DDP)


@pytest.mark.parametrize("version", [more("v2"), "v3"])
def test_an_own_image(trained, image, version):
    """The script is one of the image's own; of v2 the test of a stop has another."""
    assert "model.pt" in trained(f"own_image_{version}.py", image, *DDP)


FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""


def test_a_failure_under_v3(local, image, ants_and_bees, script):
    """The SDK's own error has the exit code alone; the log and the failure file have the cause."""
    sdk.make_source(local.folder, script(FAILS, "train.py"))
    data = ("--data", str(ants_and_bees), "train-script=train.py")
    local.start("hymenoptera_v3.py", "--local", image, *data)
    assert local.wait() == 1, local.log
    assert "Process exited with code: 3" in " ".join(local.log.split()), local.log
    files = {Path(name).name: text for name, text in local.members("output.tar.gz").items()}
    first = files["failure"].decode().splitlines()[0]
    says = "rank 1 (local rank 0) ended with exit code 3"
    assert first.startswith("algo-2") and first.endswith(says)
    assert local.hosts_log().count(first) == 2, local.log  # each host says it


@pytest.fixture
def stopped(local, ants_and_bees):
    """Start an example, stop its hosts once they train; return their exit codes."""

    def stopped(name, image, *rest, limit):
        checkpoints = CHECKPOINTS if "spot" in name else ()
        data = ("--data", str(ants_and_bees))
        local.start(name, *arguments(name, image), *data, *checkpoints, *rest)
        poll(lambda: "epoch=0 " in local.log or local.ended(), 300)
        codes = local.stop(limit)
        assert local.wait() == 1, local.log
        return codes

    return stopped


def test_a_stop_of_v2(local, stopped, image):
    endless = ("train-script=train_ddp.py", "epochs=100000", "samples=64")
    assert stopped("own_image_v2.py", image, *endless, limit=60) == [143, 143], local.log
    assert "stopped by SIGTERM; saved /opt/ml/checkpoints/" in local.hosts_log()


def test_a_stop_of_v3_in_awss_image(local, stopped, torchvision, aws_image):
    """The launcher's init takes the place of the SDK's shell, which is PID 1 there."""
    sdk.make_source(local.folder, *TRAIN_HYMENOPTERA.parent.glob("*.py"))
    small = [word for pair in SMALL[:-1] for word in f"--{pair}".split("=")]
    codes = stopped("spot_v3.py", aws_image, *small, "--epochs", "100000", limit=60)
    assert codes == [143, 143], local.log
    assert "stopped by SIGTERM; saved /opt/ml/checkpoints/" in local.hosts_log()


@pytest.mark.more
def test_a_stop_of_v3_with_an_entry_script_reaches_no_rank(local, stopped, image):
    """As docs/guide.md says: who needs a stop to be heard gives a command."""
    sdk.make_source(local.folder)
    example = (sdk.EXAMPLES / "hymenoptera_v3.py").read_text()
    command = 'command="exec python3 launcher.py init python3 launcher.py"'
    assert command in example
    path = local.folder / "entry_script_v3.py"
    path.write_text(example.replace(command, 'entry_script="launcher.py"'))
    endless = ("train-script=train_ddp.py", "epochs=100000", "samples=64")
    codes = stopped(str(path), image, *endless, limit=3)
    assert 137 in codes and 143 not in codes, local.log  # one that is late sees the other gone
    assert "stopping; the ranks" not in local.hosts_log()
