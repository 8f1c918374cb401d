"""--launcher-log-dir: what each rank prints is in a file of its own, and copied to the console."""

import contextlib
import os
import re
import select
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import LAUNCHER, PATIENT, ended_by, has_ended, poll, slow, words_of
from launcher.host.console import Console
from launcher.run.rank_logs import COPIER

from launcher.result.last_words import last_words

# The process that copies, alone.


class Copied:
    """A copier that writes to a pipe, and the launcher's end of it."""

    def __init__(self, folder: Path, how: str = "plain") -> None:
        self.folder = folder
        self.reader, writer = os.pipe()
        saved = os.dup(1)
        os.dup2(writer, 1)
        try:
            self.console = Console([sys.executable, "-I", "-S", COPIER, how], os.environ)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            os.close(writer)
        self.process = psutil.Process(self.console.pid)

    def follow(self, *ranks: int) -> None:
        self.console.follow([(rank, str(self.path(rank)), 0) for rank in ranks])

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def prints(self, rank: int, text: str) -> None:
        with open(self.path(rank), "ab", 0) as file:
            file.write(text.encode())

    def shown(self, text: str) -> None:
        """Wait until the console has this, and nothing else."""
        data = b""
        deadline = time.monotonic() + 30
        while data != text.encode():
            seconds = deadline - time.monotonic()
            assert text.encode().startswith(data) and seconds > 0, data
            if select.select([self.reader], [], [], seconds)[0]:
                data += os.read(self.reader, 1 << 16)

    def rest(self) -> str:
        """Return what is on the console until its end."""
        with open(self.reader, newline="", closefd=False) as file:
            return file.read()

    def close(self) -> None:
        with contextlib.suppress(psutil.Error):
            self.process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.console.pid, 0)
        self.console.close()
        os.close(self.reader)


@pytest.fixture
def copied(tmp_path):
    made = []

    def copied(*how):
        made.append(Copied(tmp_path, *how))
        return made[-1]

    yield copied
    for one in made:
        one.close()


def test_lines_begin_with_their_rank(copied):
    """Also where two ranks are in the middle of a line."""
    copier = copied("prefix")
    copier.follow(0, 5)
    copier.prints(0, "begun ")
    copier.prints(5, "Traceback:\n  File x\nValueError")
    copier.shown("[rank 5] Traceback:\n[rank 5]   File x\n[rank 0] begun \n[rank 5] ValueError")
    copier.prints(0, "and ended\r\n")
    copier.shown("\n[rank 0] begun and ended\r\n")
    assert copier.console.end()


def test_what_was_there_before_is_not_copied(copied):
    copier = copied()
    copier.prints(0, "of an earlier job\n")
    copier.console.follow([(0, str(copier.path(0)), copier.path(0).stat().st_size)])
    copier.prints(0, "new\n")
    copier.shown("new\n")
    # Of a file that somebody empties, what comes after that is.
    copier.path(0).write_text("")
    copier.console.sync()
    time.sleep(0.2)  # it looks 10 times a second
    copier.prints(0, "after\n")
    copier.shown("after\n")


def test_bars_come_once_a_second_and_their_last_state_always(copied):
    copier = copied("prefix")
    copier.follow(3)
    copier.prints(3, "begins\n")
    copier.shown("[rank 3] begins\n")
    ends = time.monotonic() + 3.5
    count = 0
    while time.monotonic() < ends:
        count += 1
        copier.prints(3, f"\r{count} of many")
        time.sleep(0.01)
    copier.prints(3, f"\r{count} of {count}\nnext\n")
    assert copier.console.end()
    text = copier.rest()
    *states, last = text.partition("\n")[0].split("\r")
    assert 2 <= len(states) <= 5 and last == f"[rank 3] {count} of {count}"
    assert text.endswith("\n[rank 3] next\n")


def test_a_line_that_does_not_end_is_copied_all_the_same(copied):
    copier = copied()
    copier.follow(0)
    copier.prints(0, "x" * 70_000)
    copier.shown("x" * 70_000 + "\n")
    copier.prints(0, "Continue? ")
    copier.shown("Continue? ")
    copier.prints(0, "yes\n")
    copier.shown("yes\n")
    copier.prints(0, "end")
    assert copier.console.end() and copier.rest() == "end\n"


def test_a_bar_beside_a_long_line_is_copied_at_once(copied):
    """To look for what it overwrites takes no longer for a long line."""
    copier = copied()
    copier.prints(0, "x" * 250_000 + "\n\rbar 1\rbar 2\n")
    copier.follow(0)
    copier.shown("x" * 250_000 + "\nbar 2\n")
    assert copier.console.end()


def test_a_line_of_the_launcher_comes_behind_what_ranks_have_written(copied):
    """But for a line that a rank is in the middle of."""
    copier = copied()
    copier.follow(0)
    copier.prints(0, "one line\n" * 50_000 + "begun")
    text = "one line\n" * 50_000
    with ThreadPoolExecutor() as pool:
        synced = pool.submit(copier.console.sync)
        copier.shown(text)
        synced.result(60)


@pytest.mark.parametrize("how", ["stopped", "blocked", "killed"])
def test_what_becomes_of_it_holds_nobody_up(copied, how):
    """For lines of the launcher half a second, once; at the end 5 s at most."""
    copier = copied()
    copier.follow(0)
    copier.prints(0, "one line\n" * 100_000)  # more than a pipe holds
    if how == "stopped":
        copier.process.suspend()
    if how == "killed":
        copier.process.kill()
    began = time.monotonic()
    for _ in range(100):
        copier.console.sync()
    assert copier.console.end() is False
    assert time.monotonic() < began + 50  # a hundred waits would have been so long
    poll(lambda: has_ended(copier.process.pid))


def test_what_a_slow_console_does_not_get_is_said_there(copied):
    """And the last lines come, with the traceback in them."""
    copier = copied("prefix")
    copier.follow(1)
    with open(copier.path(1), "wb") as file:
        for _ in range(64):
            file.write(b"one of many lines\n" * (1 << 16))
        file.write(b"ValueError: loss is nan\n")
    size = copier.path(1).stat().st_size

    def read():
        text = b""
        while data := os.read(copier.reader, 1 << 12):
            text += data
            time.sleep(0.001)
        return text.decode()

    with ThreadPoolExecutor() as pool:
        reads = pool.submit(read)
        assert copier.console.end()
        text = reads.result(60)
    said = re.search(
        r"^launcher: (\d+) bytes of rank 1's output are not shown here, because the console "
        r"is slow; (.*) has them\.$",
        text,
        re.MULTILINE,
    )
    assert said and said[2] == str(copier.path(1))
    before, after = text[: said.start()], text[said.end() + 1 :]
    assert after.endswith("\n[rank 1] ValueError: loss is nan\n")
    shown = before.replace("[rank 1] ", "") + after.replace("[rank 1] ", "")
    assert len(shown) + int(said[1]) == size


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_no_signal_of_the_job_ends_it(copied, number):
    copier = copied()
    copier.follow(0)
    copier.prints(0, "before\n")
    copier.shown("before\n")  # it has begun
    copier.process.send_signal(number)
    copier.prints(0, "after\n")
    copier.shown("after\n")


def test_it_ends_with_the_launcher(copied):
    copier = copied()
    copier.follow(0)
    copier.prints(0, "the last\n")
    copier.console.close()
    assert copier.rest() == "the last\n"
    assert os.waitpid(copier.console.pid, 0)[1] == 0


# The reason, by the last lines.

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
        ("free(): invalid pointer", "free(): invalid pointer"),
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
        ("Fatal Python error: Aborted\n\nCurrent thread 0x1\n", ""),
        ("the script says terminate called after throwing an instance of 'x'\n", ""),
        ("use malloc() to get memory\n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_why_a_rank_was_aborted(text, words):
    assert last_words(text) == words


# Jobs.

WAYS = pytest.mark.parametrize("way", ["cold", slow("warm")])


def host_with(start, path, *options, way="cold", nproc=2, both=False, **environ):
    """Start a launcher with logs, whose stdout and stderr are one file, if that is asked for."""
    command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *PATIENT] if both else LAUNCHER
    words = ("--train-script", path, "--launcher-log-dir", "logs", "--launcher-start", way)
    return start(*words, "--launcher-nproc-per-node", nproc, *options, command=command, **environ)


def log_of(rank, attempt=1):
    return Path("logs", "localhost", f"attempt-{attempt}", f"rank-{rank}.log")


def copier_of(host):
    (found,) = (one for one in host.children if any("copier.py" in w for w in words_of(one)))
    return found


FAILS_ONCE = """
import fcntl, os, sys, time
rank, attempt = os.environ["RANK"], os.environ["LAUNCHER_ATTEMPT"]
assert "LAUNCHER_RANK_LOGS" not in os.environ and not sys.stdout.isatty()
assert os.path.samestat(os.fstat(1), os.fstat(2))
assert fcntl.fcntl(1, fcntl.F_GETFL) & os.O_APPEND
print("out", rank, attempt)
print("err", rank, attempt, file=sys.stderr)
os.system(f"echo child {rank} {attempt}")
if attempt == "1" and rank == "0":
    open("has-printed", "w").close()
if attempt == "1" and rank == "1":
    while not os.path.exists("has-printed"):
        time.sleep(0.01)
    raise ValueError("loss is nan")
"""


@pytest.mark.torch
@WAYS
def test_each_attempt_has_its_files_and_the_console_a_copy(start, script, way):
    """Of all streams and processes of a rank; lines of the launcher come in their places."""
    options = ("--launcher-log-prefix", "true", "--launcher-max-restarts", "1")
    host = host_with(start, script(FAILS_ONCE), *options, way=way, both=True)
    assert host.wait() == 0, host.log()
    for attempt in (1, 2):
        for rank in (0, 1):
            about = f"{rank} {attempt}\n"
            text = log_of(rank, attempt).read_text()
            assert text.startswith(f"out {about}err {about}child {about}")
            copied = "".join(f"[rank {rank}] {line}" for line in text.splitlines(keepends=True))
            of_attempt = [line for line in host.out.splitlines() if line in copied.splitlines()]
            assert of_attempt == copied.splitlines()
    lines = host.out.splitlines()
    failed = [n for n, line in enumerate(lines) if "rank 1 (local rank 1) failed with" in line]
    raised = lines.index("[rank 1] ValueError: loss is nan")
    assert raised < failed[0]
    assert lines.index("[rank 0] out 0 2") < lines.index(lines[-1]) and "launcher:" in lines[-1]
    assert host.leftovers() == []


APPENDS = "import sys; print('of job', sys.argv[1])"


@pytest.mark.torch
def test_a_second_job_appends_and_only_its_own_lines_are_copied(start, script):
    for number in (1, 2):
        host = host_with(start, script(APPENDS), number, nproc=1)
        assert host.wait() == 0, host.log()
        assert host.out == f"of job {number}\n"
    assert log_of(0).read_text() == "of job 1\nof job 2\n"


EARLY = """
import os, sys
if "RANK" in os.environ:
    print("before the script", file=sys.stderr)
"""


@pytest.mark.torch
def test_what_python_says_before_the_script_is_there_too(start, script, tmp_path):
    (tmp_path / "site").mkdir()
    path = script("print('script')")
    script(EARLY, "site/sitecustomize.py")
    host = host_with(start, path, nproc=1, PYTHONPATH=str(tmp_path / "site"))
    assert host.wait() == 0, host.log()
    lines = log_of(0).read_text().splitlines()
    assert lines[0] == "before the script" and lines[-1] == "script"


STOPS = """
import os, signal, sys, time
def stop(number, _):
    print("saving", flush=True)
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("trains", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.torch
@WAYS
def test_a_stop_of_the_whole_group_leaves_the_last_lines_before_the_end(start, script, way):
    host = host_with(start, script(STOPS), way=way, both=True)
    host.wait_for("trains", 2)
    os.killpg(host.process.pid, signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM)
    *lines, end = host.out.splitlines()
    assert lines.count("saved") == 2 and "stopped by SIGTERM" in end, host.log()
    assert log_of(0).read_text() == log_of(1).read_text() == "trains\nsaving\nsaved\n"
    assert host.leftovers() == []


KILLED = """
import os, signal
for number in range(100_000):
    os.write(1, b"line %d\\n" % number)
os.kill(os.{whom}, signal.SIGKILL)
import time
time.sleep(600)
"""


@pytest.mark.torch
@WAYS
@pytest.mark.parametrize("whom", ["getpid()", "getppid()"])
def test_nothing_is_lost_at_a_kill(start, script, way, whom):
    """Of the rank, or of the launcher: then the copy ends, too."""
    host = host_with(start, script(KILLED.format(whom=whom)), way=way, nproc=1)
    assert host.wait() == ended_by(signal.SIGKILL), host.log()
    poll(lambda: not host.processes())
    text = "".join(f"line {number}\n" for number in range(100_000))
    assert log_of(0).read_text() == text and host.out == text


MANY = """
import os
for number in range(50):
    os.write(1, b"one of many lines\\n" * 6000)
open("written", "w").close()
"""


@pytest.mark.torch
@pytest.mark.parametrize("how", ["blocked", slow("stopped")])
def test_no_rank_waits_for_who_copies_and_the_end_not_for_long(start, script, tmp_path, how):
    os.mkfifo("console")
    console = os.open("console", os.O_RDWR)
    command = ["sh", "-c", 'exec "$@" >console', "sh", *LAUNCHER]
    path = script("import time, os\nwhile not os.path.exists('go'): time.sleep(0.05)\n" + MANY)
    options = ("--launcher-log-dir", "logs")
    host = start("--train-script", path, *options, command=command)
    poll(lambda: log_of(0).exists())
    copier = poll(lambda: copier_of(host))
    if how == "stopped":
        copier.suspend()
    open("go", "w").close()
    assert host.wait() == 0, host.log()
    os.close(console)
    assert os.path.exists("written") and log_of(0).read_text() == "one of many lines\n" * 300_000
    assert "launcher: the console did not take all of the ranks' output; all of it is in " in (
        host.err
    )
    assert host.leftovers() == []


FAST = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("runs", flush=True)
block = (b"." * 99 + b"\\n") * 10_000
while True:
    began = time.monotonic()
    os.write(1, block)
    time.sleep(max(0, 0.005 - (time.monotonic() - began)))
"""


@pytest.mark.torch
def test_a_stop_of_a_job_that_prints_200_mb_a_second(start, script):
    """What the console did not get by then is said, and that is all that it costs."""
    host = host_with(start, script(FAST), nproc=1)
    host.wait_for("runs")
    poll(lambda: log_of(0).stat().st_size > 2e8)
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM)
    size, left_out = log_of(0).stat().st_size, 0
    if said := re.search(
        r"launcher: (\d+) bytes of rank 0's output are not shown here.*\n", host.out
    ):
        left_out = int(said[1]) + len(said[0].encode()) * -1
    assert len(host.out) + left_out == size
    assert "did not take all" not in host.err
    log_of(0).unlink()


@pytest.mark.torch
def test_a_file_that_cannot_be_written_costs_the_job_nothing(start, script):
    log_of(0).mkdir(parents=True)
    host = host_with(start, script("print('hello')"), nproc=1)
    assert host.wait() == 0, host.log()
    where = log_of(0).absolute()
    assert f"cannot write {where} (Is a directory); the job continues without it." in host.err
    assert host.out == "hello\n"


@pytest.mark.torch
def test_what_torchrun_redirects_stays_its_own(start, script):
    path = script("import sys; print('out'); print('err', file=sys.stderr)")
    host = host_with(start, path, "--launcher-torchrun-args", "--redirects 1", nproc=1)
    assert host.wait() == 0, host.log()
    assert log_of(0).read_text() == host.out == "err\n"
    (theirs,) = Path("logs").rglob("stdout.log")
    assert theirs.read_text() == "out\n"


@pytest.mark.torch
def test_who_copies_is_missed_by_the_console_alone(start, script):
    host = host_with(start, script(STOPS), nproc=1)
    host.wait_for("trains")
    copier_of(host).kill()
    poll(lambda: "the process that copies the ranks' output has ended; " in host.err)
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM)
    assert host.out == "trains\n" and log_of(0).read_text() == "trains\nsaving\nsaved\n"


ABORTS = """
import ctypes, sys
sys.stdout.write("begins\\n")
ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(ctypes.create_string_buffer(99)) + 8))
"""


@pytest.mark.torch
@WAYS
def test_the_reason_has_what_an_aborted_rank_said_last(start, script, way):
    host = host_with(start, script(ABORTS), way=way, nproc=1)
    assert host.wait() == ended_by(signal.SIGABRT), host.log()
    assert " was killed by SIGABRT (signal 6) in " in host.failure
    assert "script.py:4: free(): invalid " in host.failure and "see that rank's" not in host.failure


@pytest.mark.torch
def test_a_launcher_below_another_has_no_logs(start, script):
    """It has the variables of the one above, whose files these are."""
    inner = "import subprocess, sys, os\nfor n in [*os.environ]:\n"
    inner += "    if n.startswith(('TORCHELASTIC', 'LOCAL_')): del os.environ[n]\n"
    inner += "words = ['--train-script', 'inner.py', '--launcher-rdzv-port', '29555']\n"
    inner += "sys.exit(subprocess.call([sys.executable, '-m', 'launcher', *words]))"
    script("print('inner')", "inner.py")
    words = ("--train-script", script(inner), "--launcher-nproc-per-node", "1")
    host = start(*words, LAUNCHER_LOG_DIR="logs")
    assert host.wait() == 0, host.log()
    assert host.out.count("inner\n") == 1 and log_of(0).read_text() == host.out
