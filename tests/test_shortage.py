"""What runs out while ranks run: small volumes, limits, interfaces that are not there."""

from __future__ import annotations

import sys

import pytest
from conftest import LAUNCHER, RANK, run_as_rank
from network import in_namespaces

# Mounts a tmpfs of these options at a folder, runs a command, and shows the failure file.
ON_A_VOLUME = """
mount -t tmpfs -o "$1" volume "$2" && mkdir "$2/output"; folder=$2; shift 2
"$@"; code=$?; ls "$folder/output"; cat "$folder/output/failure"; exit $code
"""


@pytest.fixture
def on_volume(start, tmp_path):
    """Run a job to its end whose output folder is on a volume: its first host, exit code 1."""

    def run(options, *args, **environ):
        folder = tmp_path / "volume"
        folder.mkdir()
        in_it = ["unshare", "--mount", "sh", "-c", ON_A_VOLUME, "sh", options, str(folder)]
        output = str(folder / "output")
        host = start(*args, command=[*in_it, *LAUNCHER], SM_OUTPUT_DIR=output, **environ)
        assert host.wait() == 1, host.log()
        return host

    return run


FILLS = """
with open("volume/checkpoint.pt", "wb", buffering=0) as file:
    while True:
        file.write(bytes(4096))
"""
FILLS_INODES = """
for number in range(1000):
    open(f"volume/{number}", "w").close()
"""


@in_namespaces
@pytest.mark.parametrize(
    ("options", "text", "says"),
    [
        ("size=1m", FILLS, "volume is full (0 of 1 MiB free)\n"),
        ("nr_inodes=20", FILLS_INODES, "volume is full (0 of 20 inodes free)\n"),
    ],
    ids=["space", "inodes"],
)
def test_a_volume_that_ranks_have_filled_is_in_the_failure_file_on_it(
    on_volume, script, options, text, says
):
    host = on_volume(options, "--train-script", script(text))
    assert host.out.startswith(
        "failure\nhost, rank 0 (local rank 0) failed with OSError: [Errno 28"
    )
    assert host.out.splitlines(keepends=True)[1].endswith(says), host.log()


@pytest.fixture
def notes(script):
    """Run a script as a rank where there are small volumes; return the notes that it sends."""

    def run(text, mounts="", *prefix):
        argv = [sys.executable, RANK, "script", str(script(text))]
        ran = run_as_rank(
            ["unshare", "--mount", "sh", "-c", f'{mounts}\nexec "$@"', "sh", *prefix, *argv]
        )
        (end,) = (message["end"] for message in ran.told if "end" in message)
        return end["notes"]

    return run
