"""A container engine for the tests, and the images that they run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import certifi
import docker
import psutil
from conftest import REPO, poll

HERE = Path(__file__).resolve().parent
DATA = REPO / ".engine"
SECONDS_OF_A_STEP = 900  # of an image's build; none takes nearly as long
DEBIAN = "debian:bookworm-slim"
DEBIAN_PYTHON = "3.11"
LABEL = "sagemaker-torch-launcher.tests"  # its value: the pid of the tests that made it


@contextlib.contextmanager
def running_engine() -> Iterator[docker.DockerClient]:
    """Yield a client of the engine that runs; where none does, of one of the tests' own.

    Its images stay for the next time; `make clean` removes them.
    """
    client = _client()
    if client:
        yield client
        return
    if not shutil.which("dockerd") or os.geteuid() != 0:
        raise RuntimeError(
            "no container engine answers; start one, or run the tests as root with dockerd "
            "installed (apt-get install docker.io)"
        )
    with _using_engine() as host, mock.patch.dict(os.environ, DOCKER_HOST=host):
        yield _client()


@contextlib.contextmanager
def locked(name: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Have a lock of that name, which all processes of the tests share."""
    DATA.mkdir(exist_ok=True)
    with open(DATA / f"lock-{name}", "a") as file:
        fcntl.flock(file, how)
        yield


@contextlib.contextmanager
def _using_engine() -> Iterator[str]:
    """Yield the address of the engine that the tests' processes share, started by the first."""
    with contextlib.ExitStack() as stack:
        with locked("start"):
            stack.enter_context(locked("users", fcntl.LOCK_SH))  # until an old one has ended
            note = DATA / "address"
            host = note.read_text() if note.exists() else ""
            if not host or not _client(host):
                host = _start_engine()
                note.write_text(host)
        yield host


def _start_engine() -> str:
    remove_rules_of_lost_bridges()
    folder = tempfile.mkdtemp(prefix="engine-")
    host = f"unix://{folder}/docker.sock"
    command = ["dockerd", "--host", host, "--data-root", str(DATA)]
    command += ["--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    # As little as can be that outlives it: no bridge, no forwarding. It does need its own
    # rules for packets, where an engine that ran before has left some that drop them.
    command += ["--bridge", "none", "--ip-forward=false"]
    keeper = [str(HERE / "keep-engine.sh"), str(DATA / "lock-users"), folder, *command]
    with open(DATA / "dockerd.log", "wb") as log:
        # In a session of its own: a Ctrl-C is for the tests, and their end is for the keeper.
        process = subprocess.Popen(keeper, stdout=log, stderr=log, start_new_session=True)

    def up() -> bool:
        log = (DATA / "dockerd.log").read_text()
        assert process.poll() is None and "failed to start" not in log, log[-2000:]
        return _client(host) is not None

    poll(up)
    return host


def remove_rules_of_lost_bridges() -> None:
    """Remove what an engine that was killed has left in the kernel.

    A rule "-s 172.18.0.0/16 ! -o br-GONE -j MASQUERADE" would give every packet of a new network
    with those addresses the bridge's own as its source, and the answers would be lost.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    for table in ("filter", "nat"):
        command = ["iptables", "--wait", "--table", table]
        listed = subprocess.run([*command, "-S"], capture_output=True, text=True).stdout
        for rule in listed.splitlines():
            bridges = set(re.findall(r"\b(?:br-[0-9a-f]{12}|docker0)\b", rule))
            if bridges - interfaces:
                subprocess.run([*command, "-D", *rule.split()[1:]], check=True)


def _client(host: str = "") -> docker.DockerClient | None:
    host = host or os.environ.get("DOCKER_HOST", "")
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
    # Other processes of these tests remove theirs meanwhile.
    options = {"all": True, "ignore_removed": True, "filters": {"label": LABEL}}
    for container in client.containers.list(**options):
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
        subprocess.run([*pip, f"torch=={torch}"], check=True, timeout=SECONDS_OF_A_STEP)
        return build(client, tag, path=folder, buildargs={"DEBIAN": debian})


def build(client: docker.DockerClient, tag: str, **recipe: Any) -> str:
    """Build an image of a recipe, as docker's client takes it; return its tag."""
    with locked("images"):
        client.images.build(tag=tag, network_mode="host", rm=True, **recipe)
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
        options = {"check": True, "timeout": SECONDS_OF_A_STEP}
        subprocess.run(bootstrap, stdout=subprocess.DEVNULL, **options)
        tar = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", "-", own], stdin=tar.stdout, **options)
        assert tar.wait() == 0
    return own


def build_image(base: str, tag: str) -> str:
    """Build the image as people do, with docker's classic builder; return its tag."""
    make = ["make", "-C", str(REPO), "image", f"BASE_IMAGE={base}", f"TAG={tag}"]
    environ = {**os.environ, "DOCKER_BUILDKIT": "0"}
    make.append("BUILD_FLAGS=--network host --quiet")
    subprocess.run(make, check=True, env=environ, timeout=SECONDS_OF_A_STEP)
    return tag


def tracked_files() -> list[str]:
    """Return the files that a clean clone of this repository has."""
    return subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).splitlines()


def copy_tracked_files(folder: Path) -> None:
    """Copy this repository to a folder as a clean clone would have it.

    With the times of its files: make is to take what is installed for newer than they are.
    """
    for file in tracked_files():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / file, folder / file)
