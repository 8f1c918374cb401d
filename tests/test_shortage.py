"""What runs out while ranks run: real volumes, in a mount namespace, that are too small."""

from __future__ import annotations

import pytest
from conftest import LAUNCHER
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
    ("options", "text"),
    [("size=1m", FILLS), ("nr_inodes=20", FILLS_INODES)],
    ids=["space", "inodes"],
)
def test_the_failure_file_is_written_on_a_volume_that_ranks_have_filled(
    on_volume, script, options, text
):
    host = on_volume(options, "--train-script", script(text))
    assert host.out.startswith("failure\n") and "No space left on device" in host.out, host.log()
