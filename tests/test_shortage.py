"""What runs out while ranks run: small volumes, limits, interfaces that are not there."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

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
        "failure\nlocalhost, rank 0 (local rank 0) failed with OSError: [Errno 28"
    )
    assert host.out.splitlines(keepends=True)[1].endswith(says), host.log()


SMALL_SHM = "mount -t tmpfs -o size=16m shm /dev/shm; "
KILLED_BY_BUS_ERROR = """
from multiprocessing import shared_memory
cache = shared_memory.SharedMemory(create=True, size=64 << 20)
cache.buf[:] = bytes(64 << 20)
"""


@in_namespaces
def test_behind_a_bus_error_is_how_little_shared_memory_there_is(start, script):
    command = ["unshare", "--mount", "sh", "-c", f'{SMALL_SHM}exec "$@"', "sh", *LAUNCHER]
    host = start("--train-script", script(KILLED_BY_BUS_ERROR), command=command)
    assert host.wait() == 135, host.log()
    assert "was killed by SIGBUS (signal 7) in " in host.failure
    assert host.failure.splitlines()[0].endswith(
        ("; /dev/shm is full (0 of 16 MiB free)", "16 MiB")
    )


@pytest.fixture
def notes():
    """Run a script as a rank beside a volume of 1 MiB; return what it notes at its end."""

    def run(text, *prefix):
        path = Path(os.environ["TMPDIR"]) / "script.py"  # where any user may read it
        path.parent.chmod(0o755)
        path.write_text(text)
        mounts = "mkdir volume && mount -t tmpfs -o size=1m volume volume && chmod 777 volume"
        in_it = ["unshare", "--mount", "bash", "-c", f'{mounts}; ulimit -u 60; exec "$@"', "bash"]
        ran = run_as_rank([*in_it, *prefix, sys.executable, RANK, "script", str(path)])
        (end,) = (message["end"] for message in ran.told if "end" in message)
        return end["notes"]

    return run


FULL = "volume is full (0 of 1 MiB free)"
FILL = "open('volume/x', 'wb').write(bytes(2 << 20))"
TRIES = """
try:
    open('volume/x', 'wb').write(bytes(2 << 20))
except OSError as error:
    {}
"""


@in_namespaces
@pytest.mark.parametrize(
    ("text", "says"),
    [
        # Without a name; of the open file, by its relative path; behind other exceptions.
        (FILL, FULL),
        ("f = open('volume/x', 'wb', 0)\nwhile True: f.write(bytes(4096))", FULL),
        ("import shutil\n" + TRIES.format("shutil.copy(__file__, 'volume/y')"), FULL),
        ("import sys" + TRIES.format("sys.exit(1)"), FULL),
        (TRIES.format("raise RuntimeError('not saved') from None"), FULL),
        # There is some left, but not enough, or no more for this user.
        (
            "path = 'volume/x'\nraise OSError('Not enough free space to write 9 bytes')",
            "volume has only 1 MiB of 1 MiB free",
        ),
        ("raise OSError(122, 'Disk quota exceeded', 'volume/x')", "volume is used up"),
        # What does not come from it, on a volume that is full.
        (TRIES.format("pass") + "raise ValueError('loss is nan')", ""),
        ("import os\nos.remove('nothing')", ""),
        ("raise OSError(28, 'inotify watch limit reached', '/proc')", ""),
    ],
    ids=range(10),
)
def test_the_volume_is_named_that_is_full_if_the_error_comes_from_it(notes, text, says):
    found = notes(text)
    assert [note.endswith(says) for note in found] == [True] * bool(says), found


@in_namespaces
@pytest.mark.parametrize(
    "text",
    [
        "import threading, time\nfor _ in range(99):\n"
        "    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "import subprocess\na = [subprocess.Popen(['sleep', '9']) for _ in range(99)]",
    ],
    ids=["threads", "processes"],
)
def test_the_limit_of_processes_is_named(notes, text):
    user = str(23_000 + len(text))  # whose processes are counted, so each test has its own
    (note,) = notes(text, "setpriv", "--reuid", user, "--clear-groups")
    assert note == f"user {user} runs 60 of 60 processes and threads (ulimit -u)"


@pytest.fixture
def kinds(monkeypatch):
    """Return what is looked at behind a text."""
    spec = importlib.util.spec_from_file_location("shortage", Path(RANK).with_name("shortage.py"))
    shortage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shortage)
    for name in ("shared_memory", "space", "processes"):
        monkeypatch.setattr(shortage, f"_of_{name}", lambda *_, name=name: [name])
    monkeypatch.setattr(shortage.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    return shortage.behind


SAYS = [
    ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 5", "space"),
    ("RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed", "space"),
    ("RuntimeError: basic_ios::clear: iostream error", "space"),
    ("OSError: 16000000 requested and 4096 written", "space"),
    ("sqlite3.OperationalError: database or disk is full", "space"),
    ("SafetensorError: I/O error: No space left on device (os error 28)", "space"),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It", "shared_memory"),
    ("RuntimeError: unable to write to file </torch_7_1>: No space left", "shared_memory"),
    ("Error while creating shared memory segment /dev/shm/nccl-x (size 9)", "shared_memory"),
    ("SIGBUS", "shared_memory"),
    ("RuntimeError: can't start new thread", "processes"),
    ("std::system_error: Resource temporarily unavailable", "processes"),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: invalid header", ""),
    ("RuntimeError: [enforce fail at inline_container.cc:588] . file not found: x", ""),
    ("triton.OutOfResources: out of resource: shared memory, Required: 147456", ""),
    ("torch.OutOfMemoryError: CUDA out of memory. 2 GiB is free", ""),
    ("ValueError: no space in the name", ""),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/psm_1'", ""),
    ("ConnectionResetError: [Errno 104] Connection reset by peer", ""),
]


@pytest.mark.parametrize(("text", "kind"), SAYS)
def test_what_is_looked_at_behind_the_words_of_others(kinds, text, kind):
    assert kinds(text) == [kind] * bool(kind)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("GLOO_SOCKET_IFNAME", "device.cc:84] ifa != nullptr. Unable to find address for: ^lo"),
        ("NCCL_SOCKET_IFNAME", "Last error:\nBootstrap : no socket interface found"),
    ],
)
def test_an_interface_that_is_not_there_comes_with_those_that_are(
    kinds, monkeypatch, variable, text
):
    assert kinds(text) == ["this host's interfaces are lo, eth0"]
    monkeypatch.setenv(variable, "^lo,docker")
    assert kinds(text) == [f"{variable} is '^lo,docker', and this host's interfaces are lo, eth0"]
