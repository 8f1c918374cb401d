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
from unittest import mock

import certifi
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
            "installed (tests/cluster/install-engine.sh), or make test-without-containers"
        )
    data = REPO / ".engine"  # images stay for the next time; `make clean` removes them
    data.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        host = f"unix://{folder}/docker.sock"
        # It ends with us, even if we are killed, and takes its mounts with it.
        command = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "dockerd"]
        command += ["--host", host, "--data-root", str(data)]
        command += ["--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        # As little as can be that outlives it: no bridge, no forwarding. It does need its own
        # rules for packets, where an engine that ran before has left some that drop them.
        command += ["--bridge", "none", "--ip-forward=false"]
        with open(data / "dockerd.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with mock.patch.dict(os.environ, DOCKER_HOST=host):

                def up() -> docker.DockerClient | None:
                    assert process.poll() is None, (data / "dockerd.log").read_text()[-2000:]
                    return _client()

                yield poll(up, timeout=60)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _client() -> docker.DockerClient | None:
    host = os.environ.get("DOCKER_HOST")
    if not host and shutil.which("docker"):  # as the command has it, whose contexts only it knows
        command = ["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
        host = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    try:
        client = docker.DockerClient(base_url=host or None, timeout=600)
        client.ping()
        return client
    except docker.errors.DockerException:
        return None


def remove_leftovers(client: docker.DockerClient) -> None:
    """Remove what tests that were killed have left."""
    for container in client.containers.list(all=True, filters={"label": LABEL}):
        if not psutil.pid_exists(int(container.labels[LABEL])):
            container.remove(force=True, v=True)
    for network in client.networks.list(filters={"label": LABEL}):
        if not psutil.pid_exists(int(network.attrs["Labels"][LABEL])):
            network.remove()


def build_base(client: docker.DockerClient) -> str:
    """Return the tag of a base image: Debian's Python and the torch of this environment."""
    torch = metadata.version("torch")
    recipe = (HERE / "base" / "Dockerfile").read_bytes()
    trusted = _certificates().read_bytes()
    digest = hashlib.sha256(torch.encode() + recipe + trusted).hexdigest()
    tag = f"sm-launch-test-base:{digest[:12]}"
    if client.images.list(tag):
        return tag
    debian = _debian(client)
    with tempfile.TemporaryDirectory(prefix="base-image-") as folder:
        shutil.copy(HERE / "base" / "Dockerfile", folder)
        Path(folder, "certificates.crt").write_bytes(trusted)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--only-binary=:all:", "--python-version", DEBIAN_PYTHON, "--dest", folder]
        subprocess.run([*pip, f"torch=={torch}"], check=True)
        args = {"DEBIAN": debian}
        client.images.build(path=folder, tag=tag, buildargs=args, network_mode="host", rm=True)
    return tag


def _certificates() -> Path:
    """Return the certificates that this machine trusts, or those that came with Python's tools."""
    for path in (ssl.get_default_verify_paths().cafile, "/etc/ssl/certs/ca-certificates.crt"):
        if path and os.path.isfile(path):
            return Path(path)
    return Path(certifi.where())


def _debian(client: docker.DockerClient) -> str:
    """Return the tag of an image of Debian itself, which has no Python."""
    own = "sm-launch-test-debian"
    for tag in (DEBIAN, own):
        if client.images.list(tag):
            return tag
    with contextlib.suppress(docker.errors.APIError):
        client.images.pull(DEBIAN)
        return DEBIAN
    # Where no registry can be reached, Debian's own tool makes the same from its packages.
    with tempfile.TemporaryDirectory(prefix="debian-") as folder:
        root = os.path.join(folder, "root")
        bootstrap = ["debootstrap", "--variant=minbase", "bookworm", root]
        subprocess.run(bootstrap, check=True, stdout=subprocess.DEVNULL)
        tar = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", "-", own], check=True, stdin=tar.stdout)
        assert tar.wait() == 0
    return own


def build_image(base: str, tag: str) -> str:
    """Build the image as people do, with docker's classic builder; return its tag."""
    make = ["make", "-C", str(REPO), "image", f"BASE_IMAGE={base}", f"TAG={tag}"]
    environ = {**os.environ, "DOCKER_BUILDKIT": "0"}
    subprocess.run([*make, "BUILD_FLAGS=--network host --quiet"], check=True, env=environ)
    return tag


def copy_tracked_files(folder: Path) -> None:
    """Copy this repository to a folder as a clean clone would have it."""
    files = subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).splitlines()
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / file, folder / file)
