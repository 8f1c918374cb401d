"""Fixtures of the cluster tests: the engine and the images once, a job for each test."""

from __future__ import annotations

import io
from collections.abc import Iterator

import docker
import pytest
from pages import PAGES

from cluster import engine
from cluster.engine import copy_tracked_files
from cluster.hosts import Job


@pytest.fixture(scope="session")
def client() -> Iterator[docker.DockerClient]:
    with engine.running_engine() as client:
        with engine.locked("leftovers"):  # one after the other: none removes what another has
            engine.remove_leftovers(client)
        yield client


@pytest.fixture(scope="session")
def base(client) -> str:
    with engine.locked("base"):  # the first builds it, the others find it
        return engine.build_base(client)


@pytest.fixture(scope="session")
def image(base) -> str:
    with engine.locked("images"):
        return engine.build_image(base, "sm-launch-test")


@pytest.fixture
def which_image(request) -> str:
    """An image, by the name of its fixture."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def job(client, image, tmp_path) -> Iterator[Job]:
    """A job without hosts yet. At its end its containers and its network are removed."""
    job = Job(client, image, tmp_path / "hosts")
    try:
        yield job
        print(job.report())  # which pytest shows of a failed test
    finally:
        job.remove()


# What stands between PID 1 and `train` in AWS's PyTorch images; theirs also fakes the host's name.
AWS_SCRIPT = 'if [[ "$1" == train ]]; then train; else eval "$@"; fi'
AWS_IMAGE = f"""
RUN pip install --no-deps sagemaker_pytorch_training==3.0.0
RUN pip uninstall --yes sagemaker-torch-launcher && rm -r /opt/train_scripts
RUN echo '{AWS_SCRIPT}' > /usr/local/bin/start_with_right_hostname.sh
ENV LAUNCHER_SCRIPT_DIR= SAGEMAKER_TRAINING_MODULE=sagemaker_pytorch_container.training:main
ENTRYPOINT ["bash", "-m", "start_with_right_hostname.sh"]
"""


@pytest.fixture(scope="session")
def aws_image(client, image) -> str:
    """An image that starts as AWS's PyTorch images do, with the public parts of theirs."""
    recipe = io.BytesIO(f"FROM {image}\n{AWS_IMAGE}".encode())
    return engine.build(client, "sm-launch-test-aws", fileobj=recipe)


@pytest.fixture(scope="session")
def mpi_image(client, aws_image) -> str:
    """AWS's image as far as it is public, with what its launchers that use mpirun need."""
    recipe = {"path": str(engine.HERE / "mpi"), "buildargs": {"BASE": aws_image}}
    return engine.build(client, "sm-launch-test-mpi", **recipe)


@pytest.fixture(scope="session")
def own_aws_image(client, aws_image, tmp_path_factory) -> str:
    """What a page has people make of AWS's image."""
    entry = '["sm-launch", "init", "bash", "-m", "start_with_right_hostname.sh"]'
    assert any(f"ENTRYPOINT {entry}\n" in page.read_text() for page in PAGES)
    context = tmp_path_factory.mktemp("own-aws-image")
    copy_tracked_files(context / "sagemaker-torch-launcher")
    install = "COPY sagemaker-torch-launcher /tmp/launcher\nRUN pip install /tmp/launcher"
    (context / "Dockerfile").write_text(f"FROM {aws_image}\n{install}\nENTRYPOINT {entry}\n")
    return engine.build(client, "sm-launch-test-own-aws", path=str(context))
