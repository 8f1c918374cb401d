"""A launcher whose stderr nobody reads: a stuck `tee`, a log driver that is behind, a pager."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import LAUNCHER, completed, poll

from launcher.errors import STOPS
from launcher.host.stepping import Stepping
from launcher.peers import coordinator
from launcher.peers.events import Arrived
from launcher.peers.messages import Hello
from launcher.text import background


@pytest.fixture
def read_full_pipe(tmp_path):
    """Fill the pipe `full`; return what reads all that is in it, and what then comes."""
    os.mkfifo(tmp_path / "full")
    fd = os.open(tmp_path / "full", os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b"." * 4096)

    def read() -> str:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                data += os.read(fd, 65536)
        return data.decode().lstrip(".")

    yield read
    os.close(fd)


def test_threads_take_no_signals():
    """The loop's thread finds a stop before what the stop has ended."""
    masks = queue.Queue()
    background.start(lambda: masks.put(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    assert {*STOPS, signal.SIGCHLD} <= masks.get(timeout=60)


LAST_WORDS = """
import os, sys
from types import SimpleNamespace
from launcher.host.system import System
from launcher.run.torchrun import Torchrun
argv = [sys.executable, "-c", "import sys; sys.stderr.write(" + sys.argv[1] + "); sys.exit(1)"]
system = SimpleNamespace(start_thread=System.start_thread)
torchrun = Torchrun(system, argv, os.environ, "", sys.argv[2])
os.waitpid(torchrun.pid, 0)
print(torchrun.words())
"""


@pytest.mark.parametrize(
    ("writes", "words"),
    [
        ("'a line\\n' * 20_000 + 'the last words\\n'", "the last words"),
        ("'x' * 200_000 + '\\nthe last words'", "the last words"),
        ("'10%\\r20%\\rtorchrun: error: no such option\\n \\n'", "no such option"),
        ("''", ""),
    ],
)
def test_the_last_words_of_torchrun_count_however_much_it_has_written(tmp_path, writes, words):
    done = completed(sys.executable, "-c", LAST_WORDS, writes, tmp_path, timeout=60)
    assert done.stdout == f"{words}\n"
    assert done.stderr.count("a line\n") == 20_000 * writes.count("a line")


WRITES = """
import sys
sys.stdout.write("one of many lines\\n" * 200_000)
sys.stdout.flush()
print("is written", file=sys.stderr, flush=True)
raise ValueError("loss is nan")
"""


@pytest.mark.torch
def test_what_torchrun_copies_for_a_late_reader_is_not_lost(script, tmp_path):
    """torchrun --tee 3, where a rank fails and torchrun has 3 MB to copy."""
    arguments = ("--train-script", script(WRITES), "--launcher-torchrun-args", "--tee 3")
    arguments += ("--launcher-failure-grace", "100")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*LAUNCHER, *arguments], cwd=tmp_path, **pipes) as process:
        said = (line for line in process.stderr)
        assert any("is written" in line for line in said)
        assert any("ValueError: loss is nan" in line for line in said)
        time.sleep(4)  # longer than a torchrun has that copies nothing
        assert process.stdout.read().count("one of many lines") == 200_000
        assert process.wait(60) == 1


LOG = """
import sys
from launcher.text.log import log
for number in range(3000):
    log(f"line {number}")
print("logged", flush=True)
sys.stdin.read()
log("the last line")
"""


def test_lines_that_nobody_reads_are_counted(read_full_pipe, tmp_path):
    """A thousand wait for a reader; the others are lost, and that is said where they would be."""
    command = ["sh", "-c", f'exec "$@" 2>{tmp_path / "full"}', "sh", sys.executable, "-c", LOG]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "logged\n"
        data: list[str] = []
        poll(lambda: data.append(read_full_pipe()) or "not written" in "".join(data))
        process.stdin.close()
        assert process.wait(60) == 0
    lines = "".join([*data, read_full_pipe()]).splitlines()
    assert lines[:1000] == [f"launcher: line {number}" for number in range(1000)]
    lost = "launcher: 2000 lines of this log were not written, because it was not read in time."
    assert lines[1000:] == [lost, "launcher: the last line"]


def test_a_launcher_that_can_start_no_thread_says_so_all_the_same():
    """As where a container's limit on processes is used up: here no stack has room for one."""
    limits = 'ulimit -s 4000000 && ulimit -v 2500000 && exec "$@"'
    command = ["sh", "-c", limits, "sh", *LAUNCHER, "--train-script", "missing.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("launcher: --train-script missing.py: there is neither ")
    assert done.stderr.count("\n") == 1


def test_the_verbose_log_shows_no_arguments_of_the_script():
    """They are compared between hosts when one joins, and may be secret."""
    hello = Hello("job", "algo-2", {"script's arguments": ["--key", "xyz"]}, 1)
    joins = Arrived(hello, "10.0.0.2")
    states = [SimpleNamespace(phase=coordinator.Running(), number=number) for number in (1, 2)]
    lines: list[str] = []
    system = SimpleNamespace(now=lambda: 1.5, log=lines.append)
    Stepping(system, states[0], lambda *_: (states[1], ()), print, "hosts").happens(joins)
    said = "0.000 s: hosts Running on Arrived(hello=Hello(job='job', host='algo-2'), address="
    assert lines[0].startswith(said) and "xyz" not in lines[0]
