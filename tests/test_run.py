"""One host, real torchrun, real processes: what reaches the ranks and how a job ends."""

import contextlib
import json
import os
import pty
import selectors
import signal
import socket
import subprocess
import sys
import textwrap

import psutil
import pytest
from conftest import LAUNCHER, REPO, completed, ended_by, write_config

from launcher.run.supervisor import ready

pytestmark = pytest.mark.torch

TWO_RANKS = ("--launcher-nproc-per-node", "2")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"PET_NODE_RANK": "x"}, "argument --node-rank/--node_rank: invalid int value: 'x'"),
        (
            {"PET_LOG_DIR": "/proc/x"},
            "FileNotFoundError: [Errno 2] No such file or directory: '/proc/x'",
        ),
        (
            {"PET_RDZV_CONF": "x="},
            "ValueError: The rendezvous configuration option 'x' must have a value specified.",
        ),
    ],
)
def test_what_torchrun_refuses_is_exit_2_with_its_words(start, script, environ, says):
    host = start("--train-script", script("print('ran')"), **environ)
    assert host.wait() == 2, host.log()
    assert host.failure.splitlines()[0] == f"localhost: torchrun failed: {says}"
    assert host.err.splitlines()[-2] == f"launcher: {host.failure.splitlines()[0]}"


SEES = """
import json, os, sys
names = ("WORLD_SIZE", "SM_HP_X", "MASTER_ADDR", "OMP_NUM_THREADS", "LAUNCHER_INIT")
words = [os.fsencode(word).hex() for word in sys.argv[1:]]
seen = [words, __spec__.name, sys.path[0], *map(os.environ.get, names)]
json.dump(seen, open("rank-" + os.environ["RANK"], "w"))
print("hello")
"""


def test_what_every_rank_is_given(start, script, tmp_path):
    """Above all its arguments, byte for byte, though torchrun has options of these names."""
    arguments = ["a b", "'\"", "$HOME", "$$", "${rank}", "${local_rank}", "\n", "", "é\udcff", "-x"]
    arguments += ["--", "--log", "1", "--node", "--run", "--l", "--t", "--train", "x", "--help"]
    arguments += ["--nproc-per-node", "7", "-m", "local"]
    (tmp_path / "package").mkdir()
    script(SEES, "package/tool.py")
    environ = {"PET_NPROC_PER_NODE": "3", "SM_HP_X": "1", "OMP_NUM_THREADS": "7"}
    environ["LAUNCHER_INIT"] = "none:token"  # of no rank: it may become a user that nobody trusts
    options = ("--train-module", "package.tool", "--launcher-log-dir", "logs")
    host = start(*options, *arguments, **environ)
    host.ends(0)
    words = [os.fsencode(word).hex() for word in arguments]
    seen = [words, "package.tool", str(tmp_path), "3", "1", "localhost", "7", None]
    assert {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank-*")} == {
        f"rank-{rank}": seen for rank in range(3)
    }
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("rank-*.log")]
    assert logs == ["hello\n"] * 3 and host.out.count("hello") == 3


def test_closed_streams_cost_nothing(start, script):
    """Nor have ranks a socket of ours in their place."""
    text = """
        import os
        print("x" * 1_000_000, flush=True)
        assert os.readlink("/proc/self/fd/0") == "/dev/null"
        assert all(os.readlink(f"/proc/self/fd/{n}").startswith("pipe:") for n in (1, 2))
    """
    argv = [*LAUNCHER, "--train-script", script(textwrap.dedent(text))]
    host = start("-c", 'exec "$@" <&- >&- 2>&-', "sh", *argv, command=["sh"])
    host.ends(0)


@pytest.mark.torch
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no safe path before 3.11")
def test_torchrun_imports_nothing_of_the_current_folder(start, script, tmp_path):
    script("raise RuntimeError('torchrun has imported it')", "queue.py")
    path = script("import os; print(os.environ.get('PYTHONSAFEPATH'), os.getcwd())")
    host = start("--train-script", path)
    assert host.wait() == 0, host.log()
    assert host.out == f"None {tmp_path}\n"


def test_stdout_and_stdin_are_the_launchers_own(script):
    path = script("import sys; print(sys.stdout.isatty(), sys.stdin.readline().strip())")
    ours, theirs = pty.openpty()
    argv = [*LAUNCHER, "--train-script", str(path)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE)
    _, err = process.communicate(b"typed\n", timeout=150)
    assert process.returncode == 0, err.decode()
    assert os.read(ours, 100) == b"True typed\r\n"
    os.close(ours)
    os.close(theirs)


def test_an_empty_model_folder_is_said_but_not_of_a_local_job(start, script, tmp_path):
    write_config(tmp_path / "ml")
    script("print('trained')\n")
    sagemaker = {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}
    said = [
        "SageMaker will upload nothing" in host.err
        for more in ({}, {"LAUNCHER_EVENTS_DIR": str(tmp_path)})
        if (host := start("--train-script", "script.py", **sagemaker, **more)).wait() == 0
    ]
    assert said == [True, False]


# How a job fails

FAIL = """
import os, signal, sys, time

def inner():
    {end}

rank = int(os.environ["RANK"])
if rank == 1:
    inner()
print("ready", flush=True)
time.sleep(60)
"""
IN_INNER = "was killed by SIGSEGV (signal 11) in inner, script.py:5\n"
EXECS = "os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(7)'])"
NO_LICENSE = 'ended with exit code 7; its last line: "no license"\n'


ENDS = [
    ("raise ValueError('bad\\nat step 17')", 1, "failed with ValueError: bad at step 17"),
    # what Python raises in no main thread
    ("os.kill(os.getpid(), signal.SIGSEGV)", 139, IN_INNER),
    # another program in its place: only torchrun knows how that ends
    (EXECS, 7, "ended with exit code 7\n"),
    # it has printed why
    ("os.write(2, b'no license\\n'); os._exit(7)", 7, NO_LICENSE),
    ("print('step 1\\rno license\\n', file=sys.stderr); sys.exit(7)", 7, NO_LICENSE),
]


@pytest.mark.parametrize(("end", "code", "says"), ENDS, ids=[row[0] for row in ENDS])
def test_the_first_rank_to_fail_gives_the_exit_code_and_the_text(start, script, end, code, says):
    path = script(FAIL.format(end=end))
    host = start("--train-script", path, *TWO_RANKS)
    host.ends(code)
    head, details, *frames = host.failure.splitlines()
    assert f"{head}\n".startswith(f"localhost, rank 1 (local rank 1) {says}")
    assert details.startswith(f"exit code {code}, ")
    assert "first of" not in details  # rank 0 was ended by the stop
    assert "torch/distributed" not in host.failure and "launcher" not in host.failure
    if "ValueError" in end:
        assert frames[0] == "Traceback (most recent call last):"
        assert f'File "{path}", line' in frames[1] and "inner()" in host.failure
        assert completed(sys.executable, path, code=1, RANK="1").stderr in host.err
    assert f"launcher: stopping this host's ranks: {head}\n" in host.err


CLEANS_UP = """
import time, torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    try:
        raise ValueError("loss is nan")
    finally:
        dist.destroy_process_group()  # which the other rank sees
        time.sleep(0.5)
try:
    dist.all_reduce(torch.ones(1))
except Exception as error:
    raise RuntimeError("training failed") from error
"""


def test_the_rank_that_breaks_a_collective_is_named_not_its_echo(start, script):
    host = start("--train-script", script(CLEANS_UP), *TWO_RANKS)
    host.ends(1)
    says = "localhost, rank 1 (local rank 1) failed with ValueError: loss is nan\n"
    assert host.failure.startswith(says), host.log()


# How a job is stopped

COUNT = """
import os, signal, sys, time
heard = []
def stop(number, frame):
    heard.append(number)
    os.write(1, b"heard %d\\n" % number)  # at once: ranks share the file
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
os.write(1, b"ready\\n")
while not heard:
    time.sleep(0.01)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.sleep(0.01)
os.write(1, b"saved after %d\\n" % len(heard))
sys.exit(int(sys.argv[2]))
"""


def test_a_stop_reaches_every_rank_once_and_leaves_it_time(start, script):
    number = signal.SIGTERM
    host = start("--train-script", script(COUNT), "2", "7", *TWO_RANKS)
    host.wait_for("ready", 2)
    # To the launcher's process group, as a terminal and `tini -g` do it.
    os.killpg(host.process.pid, number)
    host.wait_for(f"heard {int(number)}", 2)
    host.signal(number)  # impatience does not shorten a save
    host.ends(ended_by(number))
    assert host.out.count("heard") == 2
    assert host.out.count("saved after 1") == 2
    assert "during the stop: localhost, rank 0 (local rank 0) ended with exit code 7" in host.err


def test_signals_that_were_ignored_or_blocked_by_the_parent(start, script):
    spoil = "signal(SIGCHLD, SIG_IGN); pthread_sigmask(SIG_BLOCK, [SIGCHLD, SIGTERM])"
    code = f"import os, sys; from signal import *; {spoil}; os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", code, *LAUNCHER]
    stopped = start("--train-script", script(COUNT), "0", "0", command=command)
    stopped.wait_for("ready")
    stopped.signal(signal.SIGTERM)
    stopped.ends(ended_by(signal.SIGTERM))
    assert "saved after 1" in stopped.out


def test_a_torchrun_that_dies_takes_its_ranks_along_though_no_descriptor_is_left(start, script):
    path = script("import time; print('runs', flush=True); time.sleep(99)")
    host = start("--train-script", path, *TWO_RANKS)
    host.wait_for("runs", 2)
    launcher = psutil.Process(host.process.pid)
    torchrun = host.torchrun
    last = max(int(fd) for fd in os.listdir(f"/proc/{launcher.pid}/fd"))
    few = last + 9  # so many are kept for the end
    launcher.rlimit(psutil.RLIMIT_NOFILE, (few, few))
    (folder,) = (path for path in os.listdir(host.tmp) if path.startswith("sm-launch-"))
    with contextlib.ExitStack() as ranks:  # many, which wait for a descriptor
        for _ in range(50):
            rank = ranks.enter_context(socket.socket(socket.AF_UNIX))
            rank.connect(os.path.join(host.tmp, folder, "socket"))
        torchrun.kill()
        host.ends(69)
    assert host.failure.startswith("localhost: torchrun was killed by SIGKILL (signal 9)\n")


ENDS = {"true": 0, "false": 1}


def test_processes_that_never_become_ranks_count_as_they_end(start, script):
    """As under plain torchrun, which takes what it has started for its ranks."""
    path = script("raise SystemExit(3)")
    hosts = [start("--train-script", path, *TWO_RANKS, PYTHON_EXEC=f"/bin/{it}") for it in ENDS]
    for host, code in zip(hosts, ENDS.values()):
        host.ends(code)


def test_a_line_of_the_log_is_one_write():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "from launcher.text.log import log; log('said at once')"
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True)
    assert ours.recv(1000) == b"launcher: said at once\n"
    ours.close()
    theirs.close()


@pytest.mark.more
def test_the_benchmark_of_its_own_cost_still_runs():
    overhead = REPO / "benchmarks" / "overhead.py"
    done = completed(sys.executable, overhead, "--pairs", "1", timeout=100)
    assert done.stdout.count("\n|") == 10  # eight figures below the head


def test_what_has_happened_while_a_launcher_was_stopped_comes_before_what_is_due():
    class Late(selectors.DefaultSelector):
        """What a select() sees that was stopped until its time was over: nothing."""

        def select(self, timeout=None):
            return [] if timeout else super().select(timeout)

    reader, writer = os.pipe()
    with Late() as selector, open(reader, "rb"), open(writer, "wb", buffering=0) as file:
        selector.register(reader, selectors.EVENT_READ)
        assert not ready(selector, 0.5)
        file.write(b"x")
        assert ready(selector, 0.5)
