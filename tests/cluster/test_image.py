"""The image itself: what container/Dockerfile adds to a base, and what it leaves alone."""

import os
import subprocess

import pytest
from conftest import REPO
from pages import code

import launcher
from cluster.engine import LABEL, build, copy_tracked_files
from cluster.hosts import ALONE, CONTAINERS

pytestmark = CONTAINERS


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
    assert {"psutil==7.2.2", "sagemaker_training==5.1.4"} <= set(of_image) - set(of_base)
    assert "No broken requirements found." in run(image, "python3 -m pip check")


def test_no_tools_and_no_rests_of_the_build_are_left(client, run, base, image):
    look = "for tool in cc gcc make; do command -v $tool; done;"
    look += "ls -A /tmp /src /root/.cache /var/lib/apt/lists 2>&1;"
    look += "find / -xdev -name '*.whl' 2>/dev/null; true"
    assert run(image, look) == run(base, look)
    # Nor in a layer below, deleted by one above: all that the layers hold is to be seen.
    measure = "find / -xdev -type f -printf '%s\\n' | python3 -c 'print(sum(map(int, open(0))))'"
    seen = [int(run(tag, measure)) for tag in (base, image)]
    held = [client.images.get(tag).attrs["Size"] for tag in (base, image)]
    assert abs((held[1] - held[0]) - (seen[1] - seen[0])) < 1e6


def test_what_the_image_says_of_itself(client, base, image):
    config = client.images.get(image).attrs["Config"]
    assert config["Entrypoint"] == ["sm-launch", "init"]
    prefix = "org.opencontainers.image."
    labels = {name: config["Labels"][prefix + name] for name in ("title", "version", "base.name")}
    version = launcher.__version__
    assert labels == {"title": "sagemaker-torch-launcher", "version": version, "base.name": base}


def test_a_clean_clone_builds_with_buildkit_too(base, run, tmp_path):
    """Where several docker clients are installed, not each needs to know BuildKit."""
    copy_tracked_files(tmp_path)
    words = ["build", "--quiet", "--network", "host", "--tag", "sm-launch-test-buildkit"]
    words += ["--build-arg", f"BASE_IMAGE={base}", "--file", "container/Dockerfile", "."]
    environ = {**os.environ, "DOCKER_BUILDKIT": "1"}
    folders = os.environ["PATH"].split(":")
    clients = [os.path.join(folder, "docker") for folder in folders]
    built = (
        subprocess.run([client, *words], cwd=tmp_path, env=environ).returncode == 0
        for client in clients
        if os.path.exists(client)
    )
    assert any(built)
    assert run("sm-launch-test-buildkit", "sm-launch --help").startswith("usage: sm-launch")
    assert "/train" in run("sm-launch-test-buildkit", "command -v train")


def test_the_three_lines_that_add_the_launcher_to_any_image(client, base, job, tmp_path):
    lines = code(REPO / "docs" / "guide.md", "dockerfile")[0]
    assert len(lines.splitlines()) == 3
    context = tmp_path / "context"
    copy_tracked_files(context / "sagemaker-torch-launcher")
    (context / "Dockerfile").write_text(f"FROM {base}\n{lines}")
    job.image = build(client, "sm-launch-test-own", path=str(context))
    job.add("algo-1", "algo-2")
    job.will_run("print('runs', flush=True)\nimport time; time.sleep(600)", ALONE)
    for host in job.values():
        # As SageMaker starts it.
        host.command, host.hyperparameters = ["train"], {"train-script": "script.py"}
    job.start()
    for host in job.values():
        host.wait_for("runs\n")
    job.stop()
    assert job.wait() == {"algo-1": 143, "algo-2": 143}, job.logs()
