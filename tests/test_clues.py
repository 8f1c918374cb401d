"""What the words of an error point to: full volumes, limits, killed processes, hardware."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANK, run_as_rank
from network import in_namespaces

from launcher.run import clues

MOUNT = "mkdir volume && mount -t tmpfs -o size=1m,nr_inodes=20 volume volume && chmod 777 volume"
BESIDE_A_VOLUME = ["unshare", "--mount", "bash", "-c", f'{MOUNT}; ulimit -u 60; exec "$@"', "bash"]


@pytest.fixture
def facts():
    """Run a script as a rank below other programs; return the facts that it tells at its end."""

    def run(text, *programs):
        path = Path(os.environ["TMPDIR"]) / "script.py"  # where any user may read it
        path.parent.chmod(0o755)
        path.write_text(text)
        ran = run_as_rank([*programs, sys.executable, RANK, "script", str(path)])
        (end,) = (message["end"] for message in ran.told if "end" in message)
        return end["facts"]

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
        # Without a name; behind other exceptions.
        (FILL, FULL),
        ("f = open('volume/x', 'wb', 0)\nwhile True: f.write(bytes(4096))", FULL),
        ("for n in range(20): open(f'volume/{n}', 'w')", "volume is full (0 of 20 inodes free)"),
        ("import shutil\n" + TRIES.format("shutil.copy(__file__, 'volume/y')"), FULL),
        ("import sys" + TRIES.format("sys.exit(1)"), FULL),
        (TRIES.format("raise RuntimeError('not saved') from None"), FULL),
        # There is some left, but not enough, or no more for this user.
        (
            "import os\nraise OSError(f'Not enough free space in {os.getcwd() + \"/volume/x\"!r}')",
            "volume has only 1 MiB of 1 MiB free",
        ),
        ("raise OSError(122, 'Disk quota exceeded', 'volume/x')", "volume is used up"),
        # What does not come from it, on a volume that is full.
        (TRIES.format("pass") + "raise ValueError('loss is nan')", ""),
        ("import os\nos.remove('nothing')", ""),
        ("raise OSError(28, 'inotify watch limit reached', '/proc')", ""),
    ],
    ids=range(11),
)
def test_the_volume_is_named_that_is_full_if_the_error_comes_from_it(facts, text, says):
    found = facts(text, *BESIDE_A_VOLUME)
    assert [fact.endswith(says) for fact in found] == [True] * bool(says), found


THREADS = """
import threading, time
for _ in range(99):
    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
"""


@in_namespaces
def test_the_limit_of_processes_is_named(facts):
    user = "23000"  # whose processes are counted
    as_user = (*BESIDE_A_VOLUME, "setpriv", "--reuid", user, "--clear-groups")
    (fact,) = facts(THREADS, *as_user)
    assert fact == f"user {user} runs 60 of 60 processes and threads (ulimit -u)"


def test_the_limit_of_open_files_is_named(facts):
    few = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))\n"
    assert facts(f"{few}a = [open(__file__) for _ in range(400)]") == ["ulimit -n is 300"]
    assert facts(f"{few}raise RuntimeError('received 0 items of ancdata')") == ["ulimit -n is 300"]
    assert not facts("raise OSError(23, 'Too many open files in system')")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("capture_output=True", "denied"),  # bytes
        ("capture_output=True, text=True", "denied"),
        ("stdout=subprocess.PIPE, stderr=subprocess.STDOUT", "denied"),
        ("stdout=subprocess.PIPE", "begins"),
        ("", ""),  # the log has it
    ],
)
def test_the_last_line_of_a_failed_command_that_is_in_no_log_is_told(facts, options, says):
    command = "'echo begins; echo denied >&2; exit 1'"
    found = facts(
        f"import subprocess\nsubprocess.run({command}, shell=True, check=True, {options})"
    )
    assert found == [f'the command\'s last line: "{says}"'] * bool(says)


@pytest.fixture
def kinds(monkeypatch):
    """Return what an error with a text may come from, and what hardware is broken by it."""

    def of_volumes(kinds, *_):
        return [kind for kind in ("shared memory", "space", "allocation") if kind in kinds][:1]

    monkeypatch.setattr(clues, "_of_volumes", of_volumes)
    monkeypatch.setattr(clues, "_of_processes", lambda: ["processes"])

    def run(text, code=0):
        found = clues.of_process(code, text) if code else clues.behind(text)
        return {*found["facts"], *found["counted"], found["broken"]} - {""}

    return run


CUDA = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call"
WORKER = "RuntimeError: DataLoader worker (pid {}) {}"
ECC, NVLINK = "an uncorrectable ECC error", "an uncorrectable NVLink error"
SAYS = [
    ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 5", "space"),
    ("RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed", "space"),
    ("RuntimeError: basic_ios::clear: iostream error", "space"),
    ("OSError: 16000000 requested and 4096 written", "space"),
    ("sqlite3.OperationalError: database or disk is full", "space"),
    ("SafetensorError: I/O error: No space left on device (os error 28)", "space"),
    (WORKER.format(7, "is killed by signal: Bus error. It"), "shared memory"),
    ("RuntimeError: unable to write to file </torch_7_1>: No space left", "shared memory"),
    ("Error while creating shared memory segment /dev/shm/nccl-x (size 9)", "shared memory"),
    ("RuntimeError: can't start new thread", "processes"),
    ("std::system_error: Resource temporarily unavailable", "processes"),
    # A process was killed, or may have been: whether a count rose decides.
    (WORKER.format(7, "is killed by signal: Killed. "), "memory"),
    ("RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly", "memory"),
    (WORKER.format(7, "exited unexpectedly with exit code 247. Det"), "memory"),
    ("BrokenProcessPool: A process in the process pool was terminated abruptly while", "memory"),
    ("TerminatedWorkerError: codes of the workers are {SIGKILL(-9), EXIT(1)}", "memory"),
    ("CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.", "memory"),
    ("CalledProcessError: Command 'x' returned non-zero exit status 137.", "memory"),
    ("ChildFailedError: rank : 0\n  exitcode  : -9 (pid: 7)\n  error_file: <N/A>", "memory"),
    ("RuntimeError: One of the subprocesses has abruptly died during map operation.", "memory"),
    ("ffmpeg returned with return code=-9", "memory"),
    # As torch, NCCL, CuPy, Numba and NVML say it.
    ("NCCL error in: x.cpp:3\nCuda failure 214 'uncorrectable ECC error encountered'", ECC),
    ("cupy_backends.CUDARuntimeError: cudaErrorECCUncorrectable: x", ECC),
    (CUDA.format("uncorrectable NVLink error detected during the execution"), NVLINK),
    ("E: CUDA_ERROR_NVLINK_UNCORRECTABLE", NVLINK),
    ("ValueError: no batch\npynvml.NVMLError_GpuIsLost: GPU is lost", "a lost GPU"),
    # What a restart may fix, and what is not said.
    (f"torch.AcceleratorError: {CUDA.format('an illegal memory access was')}", ""),
    ("torch.OutOfMemoryError: CUDA out of memory. GPU 0 has 79 GiB, 2 GiB is free", ""),
    ("RuntimeError: connection to the parameter server's GPUs is lost", ""),
    ("ValueError: ECC mode 3 is not known: uncorrectable", ""),
    (WORKER.format(7, "is killed by signal: Segmentation fault. "), ""),
    (WORKER.format(7, "exited unexpectedly with exit code 1. Det"), ""),
    ("ProcessExitedException: process 0 terminated with signal SIGSEGV", ""),
    ("CalledProcessError: Command 'x' died with <Signals.SIGTERM: 15>.", ""),
    ("ValueError: bad status 137 at 9, 247", ""),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: invalid header", ""),
    ("RuntimeError: [enforce fail at inline_container.cc:588] . file not found: x", ""),
    ("triton.OutOfResources: out of resource: shared memory, Required: 147456", ""),
    ("ValueError: no space in the name", ""),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/psm_1'", ""),
]


@pytest.mark.parametrize(("text", "kind"), SAYS)
def test_what_words_of_others_point_to(kinds, text, kind):
    assert kinds(text) == {kind} - {""}


def test_a_bus_error_points_to_shared_memory(kinds):
    assert kinds("step 1\n", -signal.SIGBUS) == {"shared memory"}


WHAT = "terminate called after throwing an instance of 'c10::Error'\n  what():  "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{WHAT}CUDA error: device-side assert triggered\nCUDA kernel errors might be\n\n"
         "frame #0: c10::Error::Error()\n", "c10::Error: CUDA error: device-side assert triggered"),
        (f"{WHAT}old\nline\n{WHAT}new  one\n", "c10::Error: new one"),
        ("terminate called after throwing an instance of 'int'\n", "int"),
        ("terminate called without an active exception\n",
         "terminate called without an active exception"),
        ("a\nmalloc(): corrupted top size\n", "malloc(): corrupted top size"),
        ("double free or corruption (!prev)\n", "double free or corruption (!prev)"),
        ("*** stack smashing detected ***: terminated\n",
         "*** stack smashing detected ***: terminated"),
        ("python: a.c:10: main: Assertion `x > 0' failed.\n",
         "a.c:10: main: Assertion `x > 0' failed."),
        ("Fatal Python error: none_dealloc: deallocating None\nPython runtime state: initialized\n",
         "Fatal Python error: none_dealloc: deallocating None"),
        (f"{WHAT}bad\nFatal Python error: Aborted\n\nThread 0x1\n", "c10::Error: bad"),
        # Of a data loader's worker, after which the rank has gone on.
        (f"{WHAT}bad\nTraceback (most recent call last):\n  File x\nRuntimeError: Data\n", ""),
        ("the script says terminate called after throwing an instance of 'x'\n", ""),
        ("use malloc() to get memory\n", ""),
    ],
)  # fmt: skip
def test_why_a_rank_was_aborted(text, words):
    assert clues.last_words(text) == words


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-signal.SIGABRT, '"loss": 1, ' * 6000),
        (-signal.SIGABRT, "a:1: " * 13_000),
        (1, "1" * 65536),
    ],
    ids=["fields", "numbered lines", "digits"],
)
def test_a_long_line_keeps_no_keeper_busy(code, text):
    """All that is kept of a script's output may be a single line."""
    program = f"import sys, clues; clues.of_process({code}, sys.stdin.read())"
    folder = os.path.dirname(clues.__file__)
    subprocess.run([sys.executable, "-c", program], input=text.encode(), cwd=folder, timeout=60)


CLICK = "Usage: a.py [OPTIONS]\nTry 'a.py --help' for help.\n\nError: Invalid value: 'x' is"
# faulthandler.dump_traceback_later(exit=True)
TIMER = (
    "step 1\nTimeout (0:10:00)!\n"
    + 9 * 'Thread 0x00007f3b (most recent call first):\n  File "/x/a.py", line 7 in f\n\n'
)
OUTPUTS = [
    # (exit code, the last output, what it says of the end)
    (-signal.SIGSEGV, f"{WHAT}no file", ""),
    (1, "step 1\rno license\n\n", "no license"),
    (2, "usage: a.py [-h]\na.py: error: unrecognized arguments: --n\n", "a.py: error: unrec"),
    (2, CLICK, "Error: Invalid value: 'x' is"),
    (1, TIMER, "Timeout (0:10:00)!"),
]


@pytest.mark.parametrize(("code", "output", "words"), OUTPUTS)
def test_what_the_last_output_says_of_an_end(code, output, words):
    found = clues.of_process(code, output)
    assert found["words"].startswith(words) and bool(found["words"]) is bool(words)
    assert found["facts"] == found["counted"] == []


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("GLOO_SOCKET_IFNAME", "device.cc:84] ifa != nullptr. Unable to find address for: ^lo"),
        ("NCCL_SOCKET_IFNAME", "Last error:\nBootstrap : no socket interface found"),
    ],
)
def test_an_interface_that_is_not_there_comes_with_those_that_are(monkeypatch, variable, text):
    monkeypatch.setattr(clues._socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert clues.behind(text)["facts"] == ["this host's interfaces are lo, eth0"]
    monkeypatch.setenv(variable, "^lo,docker")
    (fact,) = clues.behind(text)["facts"]
    assert fact == f"{variable} is '^lo,docker', and this host's interfaces are lo, eth0"
