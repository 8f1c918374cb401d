"""A container engine for the tests, and the images that they run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import docker
import psutil
from conftest import REPO, poll

HERE = Path(__file__).resolve().parent
DEBIAN = "debian:bookworm-slim"
DEBIAN_PYTHON = "3.11"
LABEL = "sagemaker-torch-launcher.tests"  # its value: the pid of the tests that made it


@contextlib.contextmanager
def running_engine() -> Iterator[docker.DockerClient]:
    """Yield a client of the engine that runs; where none does, of one of the tests' own."""
    client = _client()
    if client:
        yield client
        return
    if not shutil.which("dockerd") or os.geteuid() != 0:
        raise RuntimeError(
            "no container engine answers; start one, or run the tests as root with dockerd "
            "installed (tests/cluster/install-engine.sh), or leave these tests out: make test-fast"
        )
    data = REPO / ".engine"  # images stay for the next time; `make clean` removes them
    data.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        os.environ["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
        # It ends with us, even if we are killed, and takes its mounts with it.
        command = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "dockerd"]
        command += ["--host", os.environ["DOCKER_HOST"], "--data-root", str(data)]
        command += ["--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        # As little as can be that outlives it: no bridge, no forwarding. It does need its own
        # rules for packets, where an engine that ran before has left some that drop them.
        command += ["--bridge", "none", "--ip-forward=false"]
        with open(data / "dockerd.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:

            def up() -> docker.DockerClient | None:
                assert process.poll() is None, (data / "dockerd.log").read_text()[-2000:]
                return _client()

            yield poll(up, timeout=60)
        finally:
            process.terminate()
            process.wait(60)
            del os.environ["DOCKER_HOST"]


def _client() -> docker.DockerClient | None:
    try:
        client = docker.from_env(timeout=600)
        client.ping()
        return client
    except docker.errors.DockerException:
        return None


def remove_leftovers(client: docker.DockerClient) -> None:
    """Remove what tests that were killed have left."""
    containers = client.containers.list(all=True, filters={"label": LABEL})
    networks = client.networks.list(filters={"label": LABEL})
    for item in [*containers, *networks]:
        labels = item.labels if item in containers else item.attrs["Labels"]
        if not psutil.pid_exists(int(labels[LABEL])):
            item.remove(**({"force": True} if item in containers else {}))


def build_base(client: docker.DockerClient) -> str:
    """Return the tag of a base image: Debian's Python and the torch of this environment."""
    torch = metadata.version("torch").partition("+")[0]
    certificates = ssl.get_default_verify_paths().cafile
    recipe = (HERE / "base" / "Dockerfile").read_bytes()
    trusted = Path(certificates).read_bytes() if certificates else b""
    tag = f"sm-launch-test-base:{torch}-{hashlib.sha256(recipe + trusted).hexdigest()[:8]}"
    if client.images.list(tag):
        return tag
    _need_debian(client)
    with tempfile.TemporaryDirectory(prefix="base-image-") as folder:
        shutil.copy(HERE / "base" / "Dockerfile", folder)
        Path(folder, "certificates.crt").write_bytes(trusted)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--only-binary=:all:", "--python-version", DEBIAN_PYTHON, "--dest", folder]
        subprocess.run([*pip, f"torch=={torch}"], check=True)
        client.images.build(path=folder, tag=tag, network_mode="host", rm=True)
    return tag


def _need_debian(client: docker.DockerClient) -> None:
    if client.images.list(DEBIAN):
        return
    with contextlib.suppress(docker.errors.APIError):
        client.images.pull(DEBIAN)
        return
    # Where no registry can be reached, Debian's own tool makes the same from its packages.
    with tempfile.TemporaryDirectory(prefix="debian-") as folder:
        root = os.path.join(folder, "root")
        bootstrap = ["debootstrap", "--variant=minbase", "bookworm", root]
        subprocess.run(bootstrap, check=True, stdout=subprocess.DEVNULL)
        tar = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", "-", DEBIAN], check=True, stdin=tar.stdout)
        assert tar.wait() == 0


def build_image(base: str, tag: str) -> str:
    """Build the image as people do; return its tag."""
    make = ["make", "-C", str(REPO), "image", f"BASE_IMAGE={base}", f"TAG={tag}"]
    subprocess.run([*make, "BUILD_FLAGS=--network host --quiet"], check=True)
    return tag
