"""Fixtures of the cluster tests: the engine and the images once, a job for each test."""

from __future__ import annotations

import io
from collections.abc import Iterator

import docker
import pytest

from cluster import engine
from cluster.hosts import Job


@pytest.fixture(scope="session")
def client() -> Iterator[docker.DockerClient]:
    with engine.running_engine() as client:
        engine.remove_leftovers(client)
        yield client


@pytest.fixture(scope="session")
def base(client) -> str:
    return engine.build_base(client)


@pytest.fixture(scope="session")
def image(base) -> str:
    return engine.build_image(base, "sm-launch-test")


@pytest.fixture
def job(client, image, tmp_path) -> Iterator[Job]:
    """A job without hosts yet. Whatever happens, its containers and its network are removed."""
    job = Job(client, image, tmp_path / "hosts")
    yield job
    job.remove()


@pytest.fixture(scope="session")
def aws_image(client, image) -> str:
    """The image with the part of the toolkit that AWS's PyTorch images have."""
    recipe = f"FROM {image}\nRUN pip install --no-deps sagemaker_pytorch_training==3.0.0\n"
    tag = "sm-launch-test-aws"
    client.images.build(fileobj=io.BytesIO(recipe.encode()), tag=tag, network_mode="host", rm=True)
    return tag
