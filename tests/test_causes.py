"""A cause that is true, seen from outside: the launcher, real torchrun, and programs as they are.

What a rank's exception is called is in test_raised.py; this is the whole way to the file.
"""

import zipfile

import pytest

from launcher.errors import LaunchError
from launcher.run_dir import run_dir


def test_a_tmpdir_that_is_too_long_is_named(tmp_path, logged):
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    with run_dir({"TMPDIR": str(folder)}) as made:
        assert made.startswith("/tmp/sm-launch-")
    assert "TMPDIR is too long for a socket in it (" in logged()
    refused = pytest.raises(LaunchError, match=r"cannot make a folder in /proc .* at most 60 bytes")
    with refused, run_dir({"TMPDIR": "/proc"}):
        pass


HYDRA = """
import sys

def run(main):
    '''As hydra does it: print the traceback, and exit in the `except`.'''
    try:
        main()
    except Exception as error:
        print(error, file=sys.stderr)
        sys.exit(1)

def main():
    raise ValueError("loss is nan\\0\\x1b[3m")

run(main)
"""
WORKERS = """
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        try:
            return [0.0][i]
        except IndexError:
            raise ValueError(f"bad sample {i}")

if __name__ == "__main__":
    list(DataLoader(Samples(), num_workers=1))
"""
SPAWN = """
import torch.multiprocessing as mp

def train(rank):
    raise ValueError("loss is nan")

if __name__ == "__main__":
    mp.spawn(train, nprocs=1)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "says", "frame"),
    [
        (HYDRA, "failed with ValueError: loss is nan\\x00\\x1b[3m\n", "in main"),
        (
            WORKERS,
            "failed with ValueError: bad sample 1 (in DataLoader worker process 0)"
            " (while handling IndexError: list index out of range)\n",
            "in __getitem__",
        ),
        (
            SPAWN,
            "failed with ValueError: loss is nan (in spawned process 0)\n",
            "in train",
        ),
    ],
    ids=["an exit in except", "data loader", "spawn"],
)
def test_the_failure_file_names_what_went_wrong(start, script, text, says, frame):
    path = script(text)
    host = start("--train-script", path)
    assert host.wait() == 1, host.log()
    head, details, *frames = host.failure.splitlines(keepends=True)
    assert head.startswith(f"localhost, rank 0 (local rank 0) {says}")
    assert details.startswith("exit code 1, ")
    files = [line for line in frames if line.startswith("  File ")]
    assert str(path) in files[-1] and frame in files[-1]
    assert host.failure.replace("\n", "").isprintable()
    # The traceback on stderr is the script's own; the launcher's lines show nothing raw either.
    ours = [line for line in host.err.split("\n") if line.startswith("launcher: ")]
    assert all(line.isprintable() for line in ours)


@pytest.mark.torch
def test_an_archive_is_run_as_python_does(start, tmp_path):
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import sys, inner; print(sys.argv, inner.x)")
        archive.writestr("inner.py", "x = 7")
    host = start("--train-script", "app.zip", "--epochs", "3")
    assert host.wait() == 0, host.log()
    assert host.out == "['app.zip', '--epochs', '3'] 7\n"


# Rank 1 misses what rank 0 could not download.
DOWNLOAD = """
import os, socket, struct, sys, threading, time, urllib.request
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(2)
    open("data")

def reset():
    connection, _ = server.accept()
    connection.recv(65536)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()

server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=reset).start()
urllib.request.urlretrieve("http://127.0.0.1:%d/data" % server.getsockname()[1], "data")
"""
# Rank 1 reads what rank 0 sends it through multiprocessing, not torch.
FEED = """
import os, time
from multiprocessing.connection import Client, Listener

if os.environ["RANK"] == "0":
    with Listener("feed") as listener:
        open("listens", "w").close()
        try:
            with listener.accept():
                raise ValueError("loss is nan")
        finally:
            time.sleep(1)
while not os.path.exists("listens"):
    time.sleep(0.01)
Client("feed").recv()
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DOWNLOAD, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        (FEED, "ValueError: loss is nan"),
    ],
    ids=["download", "multiprocessing"],
)
def test_a_broken_connection_is_classed_by_whose_it_is(start, script, text, says):
    host = start("--train-script", script(text), "--launcher-nproc-per-node", "2")
    assert host.wait() == 1, host.log()
    line = f"localhost, rank 0 (local rank 0) failed with {says}\n"
    assert host.failure.startswith(line), host.log()


CLEANUP = """
import sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    try:
        raise ValueError("loss is nan")
    finally:
        dist.destroy_process_group()  # which the other rank sees
        time.sleep(1.5)
try:
    dist.all_reduce(torch.ones(1))
except Exception as error:
    if sys.argv[1] == "exit":
        sys.exit(1)
    raise RuntimeError("training failed") from error
"""


@pytest.mark.torch
@pytest.mark.parametrize("how", ["exit", "from"])
def test_a_cause_behind_a_cleanup_is_named_not_what_became_of_its_echo(start, script, how):
    options = ("--launcher-nproc-per-node", "2")
    host = start("--train-script", script(CLEANUP), how, *options)
    assert host.wait() == 1, host.log()
    assert host.failure.startswith(
        "localhost, rank 0 (local rank 0) failed with ValueError: loss is nan\n"
    ), host.log()
    assert host.leftovers() == []
