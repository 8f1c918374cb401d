"""The image itself: what container/Dockerfile adds to a base, and what it leaves alone."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import REPO

import launcher
from cluster.engine import LABEL
from cluster.hosts import ALONE

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture
def run(client):
    """Run a shell command in a new container of an image; return its output."""

    def run(tag: str, command: str) -> str:
        output = client.containers.run(
            tag, ["-c", command], entrypoint="sh", remove=True, labels={LABEL: str(os.getpid())}
        )
        return output.decode()

    return run


def test_python_torch_and_all_that_the_base_has_stay_as_they_are(run, base, image):
    ask = "import sys, torch; print(sys.executable, sys.version, torch.__version__, torch.__file__)"
    ask = f'python3 -c "{ask}"; python3 -m pip freeze'
    of_base, of_image = run(base, ask).splitlines(), run(image, ask).splitlines()
    assert of_base[0] == of_image[0]
    assert set(of_base) <= set(of_image)
    added = {line.partition("==")[0] for line in set(of_image) - set(of_base)}
    assert {"psutil", "sagemaker_training"} <= added
    assert "No broken requirements found." in run(image, "python3 -m pip check")


def test_no_tools_and_no_rests_of_the_build_are_left(run, base, image):
    look = "command -v cc gcc make; ls -A /tmp /src /root/.cache /var/lib/apt/lists 2>&1;"
    look += "find / -xdev -name '*.whl' 2>/dev/null"
    assert run(image, look + "; true") == run(base, look + "; true")


def test_what_the_image_says_of_itself(client, base, image):
    config = client.images.get(image).attrs["Config"]
    assert config["Entrypoint"] == ["sm-launch", "init"]
    prefix = "org.opencontainers.image."
    labels = {name: config["Labels"][prefix + name] for name in ("title", "version", "base.name")}
    version = launcher.__version__
    assert labels == {"title": "sagemaker-torch-launcher", "version": version, "base.name": base}


def test_it_builds_with_buildkit_too(base, run, tmp_path):
    """Where several docker clients are installed, not each needs to know BuildKit."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nLABEL a=b\n")
    path = os.environ["PATH"]
    folders = [folder for folder in path.split(":") if Path(folder, "docker").exists()]
    for folder in folders:
        environ = {**os.environ, "DOCKER_BUILDKIT": "1", "PATH": f"{folder}:{path}"}
        trial = subprocess.run(["docker", "build", "-q", str(tmp_path)], env=environ, check=False)
        if trial.returncode == 0:
            break
    else:
        raise AssertionError(f"no docker client in {folders} builds with BuildKit")
    make = ["make", "-C", str(REPO), "image", f"BASE_IMAGE={base}", "TAG=sm-launch-test-buildkit"]
    subprocess.run([*make, "BUILD_FLAGS=--network host -q"], env=environ, check=True)
    assert run("sm-launch-test-buildkit", "sm-launch --help").startswith("usage: sm-launch")
    assert "/train" in run("sm-launch-test-buildkit", "command -v train")


def test_the_three_lines_that_add_the_launcher_to_any_image(client, base, job, tmp_path):
    readme = (REPO / "README.md").read_text()
    lines = re.search(r"```dockerfile\n(.*?)```", readme, re.DOTALL).group(1)
    assert len(lines.splitlines()) == 3
    context = tmp_path / "context"
    tracked = subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).splitlines()
    for path in tracked:
        copy = context / "sagemaker-torch-launcher" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / path, copy)
    (context / "Dockerfile").write_text(f"FROM {base}\n{lines}")
    tag = "sm-launch-test-own"
    client.images.build(path=str(context), tag=tag, network_mode="host", rm=True)
    job.image = tag
    job.add("algo-1", "algo-2")
    job.will_run("import os; print('rank', os.environ['RANK'])", ALONE)
    for host in job.values():
        # As SageMaker starts it.
        host.command, host.hyperparameters = ["train"], {"train-script": "script.py"}
    job.start()
    assert set(job.wait().values()) == {0}, job.logs()
    assert "rank 1" in job["algo-2"].log()


def test_pid_1_is_found_by_a_name_that_is_no_users(job):
    job.add("algo-1")
    job.will_run("print(open('/proc/1/cmdline').read().split(chr(0)))", ALONE)
    job.start()
    assert job["algo-1"].wait() == 0
    words = "'/usr/bin/python3', '/usr/local/bin/sm-launch', 'init', '--train-script'"
    assert words in job["algo-1"].log()
