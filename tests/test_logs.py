"""What ranks print: on the console in whole lines; with --launcher-log-dir in files, too."""

import importlib
import os
import resource
import time
from pathlib import Path

import psutil
import pytest
from conftest import LAUNCHER, REPO

with pytest.MonkeyPatch.context() as patch:  # as a keeper imports it
    patch.syspath_prepend(str(REPO / "launcher" / "run"))
    output = importlib.import_module("output")

# Streams, alone.


@pytest.fixture
def stream_to(tmp_path):
    """Make a stream to a console that is a file: stream_to(prefix) -> it, and what prints to it."""
    pipe, prints = os.pipe()
    with open(tmp_path / "console", "wb") as console, open(prints, "wb", buffering=0) as file:
        to = output.Console(console.fileno())
        yield lambda prefix, bars=False: (output.Stream(pipe, to, -1, prefix, True, bars), file)
    os.close(pipe)


def test_a_return_without_a_line_end_is_shown_once_where_bars_are_as_they_are(stream_to, tmp_path):
    stream, prints = stream_to(b"", bars=True)
    prints.write(b"1 of 2\r")
    stream.read(100.0)
    assert 100 < stream.due <= 101
    for now in (101.0, 102.0, 103.0):
        stream.show_due(now)
    assert (tmp_path / "console").read_bytes() == b"1 of 2\r" and stream.due > 1e6


@pytest.mark.parametrize("prefix", [b"", b"[rank 5] "])
def test_lines_begin_with_their_rank(stream_to, tmp_path, prefix):
    text = b"begun " + b"x" * 200_000 + b" and ended\r\n\n" + b"line\n" * 50_000 + b"no end"
    stream, prints = stream_to(prefix)
    for begin in range(0, len(text), 1000):
        prints.write(text[begin : begin + 1000])
        stream.read(0.0)
    assert stream.finish(time.monotonic() + 60) == 0
    lines = b"".join(prefix + line for line in text.splitlines(keepends=True))
    # A last line gets its end: what others write then is a line of its own.
    assert (tmp_path / "console").read_bytes() == lines + b"\n"


def test_a_rank_without_a_file_waits_for_a_console_that_nobody_reads():
    """As with any pipe: its launcher does not keep all in memory."""
    (reader, writer), (pipe, prints) = os.pipe(), os.pipe()
    stream = output.Stream(pipe, output.Console(writer), -1, b"", True, False)
    for _ in range(200):
        if stream.is_read:
            os.write(prints, 20_000 * b"\n")
            stream.read(0.0)
    assert len(stream.console.waiting) < 100_000
    while stream.console.waiting:
        os.read(reader, 1 << 16)
        stream.console.write()
    assert stream.is_read
    for descriptor in {reader, writer, pipe, prints, stream.console.descriptor}:
        os.close(descriptor)


# Bytes; seconds that pass; a list: the lines that were shown by then, the last without its end.
RICH = b"\r\x1b[2K\x1b[1A\x1b[2K"
BARS = {
    "after 5 s": [b"\r1/9", 1, ["1/9"], b"\r2/9", 4, [], b"\r3/9", 2, ["3/9"], 9, [], b"\n", []],
    "its last state": [b"\r1/9", 1, ["1/9"], b"\r8/9\r9/9", 1, [], b"\n", ["9/9"]],
    "its last state, which nothing ends": [b"\r1/9", 1, b"\r9/9", 1, ["1/9"], "end", ["9/9"]],
    "a short one": [b"\r1/9", b"\r9/9\n", ["9/9"], 9, []],
    "return at the end": [b"1/9\r", 1, ["1/9"], b"2/9\r", 1, [], b"loss\n", ["loss"], 5, ["2/9"]],
    "behind other text": [b"epoch: ", 1, b"\repoch: 1/9", 1, ["epoch: ", "epoch: 1/9"]],
    "in colour": [b"\r\x1b[32m \x1b[0m", 9, [], b"\r\x1b[32m1\x1b[0m", 1, ["\x1b[32m1\x1b[0m"]],
    "a line of a print": [b"\r1/9", 1, b"\r2/9", 1, b"loss 3\n", ["1/9", "loss 3"], 9, ["2/9"]],
    "lines between": [b"\r1/9", 1, b"a\n\r2/9", 1, b"a\n\r9/9", 1, b"\n", ["1/9", "a", "a", "9/9"]],
    "cleared": [b"\r1/9", 1, ["1/9"], b"\r   \r", 6, [], b"loss 3\n\nx\n", ["loss 3", "", "x"]],
    "lines that end with \\r\\n": [b"a\r\n\r\nb\r", b"\n\rc\r\n\rd", ["a\r", "\r", "b", "c"]],
    "one below the other": [
        *(b"\rA 0/9", b"\n", b"\rB 0/9", b"\x1b[A", 1, ["A 0/9", "B 0/9"]),
        *(b"\rA 1/9\n\rB 1/9\x1b[A", 3, [], 3, ["A 1/9", "B 1/9"]),
        *(b"\r    \n\r    \x1b[A\rlog\n\rA 2/9\n\rB 2/9\x1b[A", ["log"]),
        *(b"\rA 3/9\n\rB 9/9\nthe end", "end", ["A 3/9", "B 9/9", "the end"]),
    ],
    "two, and lines printed between them": [
        *(b"\rA 1/9\n\rB 1/9\x1b[A", b"log 1\n", b"\rB 2/9\x1b[A", b"log 2\n"),
        *(b"\rB 3/9", b"log 3\n", "end", ["A 1/9", "log 1", "B 3/9", "log 2", "log 3"]),
    ],
    "as rich writes them": [
        *(b"A 0\nB 0", 1, ["A 0", "B 0"], RICH + b"A 1\nB 1", 1, ["", "A 1", "B 1"]),
        *(RICH + b"A 2\nB 2", 1, [], RICH + b"log\nA 3\nB 3", 1, ["log"]),
        *(b"\n", "end", ["A 3", "B 3"]),
    ],
    "above all rows": [*(b"\x1b[2A", b"x") * 3, b"\x1b[2A", b"\n", b"\x1b[A", "end", ["x"] * 3],
    "far above all rows": [b"\x1b[999999999A", b"x\x1b[" + b"9" * 5000 + b"Ay", "end", ["y", "x"]],
    "cleared by its code": [b"\r1/9", 1, ["1/9"], b"\x1b[2K2/9", "end", ["2/9"]],
    "wider than may wait": [b"\r", b"x" * 60_000, b"x" * 6000, ["x" * 66_000]],
}


@pytest.fixture
def little_memory():
    """Let this process have 256 MiB more than it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("steps", BARS.values(), ids=BARS)
def test_a_bar_on_a_console_that_is_no_terminal(stream_to, tmp_path, steps):
    """Of its states one each 5 s is a line, and the last one; other lines are whole at once."""
    (stream, prints), now, seen = stream_to(b""), 100.0, 0
    for step in steps:
        if isinstance(step, bytes):
            now += 0.02
            prints.write(step)
            stream.read(now)
        elif step == "end":
            stream.finish(time.monotonic())
        elif isinstance(step, list):
            text = (tmp_path / "console").read_bytes().decode()
            assert text[seen:].removesuffix("\n").split("\n") == (step or [""])
            seen = len(text)
        else:
            for _ in range(round(step / 0.1)):
                now += 0.1
                if now >= stream.due:
                    stream.show_due(now)


# Jobs.


def host_with(start, path, *options, way="cold", nproc=2, both=False, **environ):
    """Start a launcher with logs, whose stdout and stderr are one file, if that is asked for."""
    command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *LAUNCHER] if both else LAUNCHER
    words = ("--train-script", path, "--launcher-log-dir", "logs", "--launcher-start", way)
    return start(*words, "--launcher-nproc-per-node", nproc, *options, command=command, **environ)


def log_of(rank, attempt=1):
    return Path("logs", "localhost", f"attempt-{attempt}", f"rank-{rank}.log")


FAILS_ONCE = """
import os, sys, time
rank, attempt = os.environ["RANK"], str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
assert os.path.samestat(os.fstat(1), os.fstat(2)) and not sys.stdout.isatty()
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
@pytest.mark.parametrize("way", ["cold", "warm"])
def test_each_attempt_has_its_files_and_the_console_a_copy(start, script, way):
    """Of all streams and processes of a rank; lines of the launcher come in their places."""
    options = ("--launcher-log-prefix", "true", "--launcher-max-restarts", "1")
    host = host_with(start, script(FAILS_ONCE), *options, way=way, both=True)
    host.ends(0)
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


ALL_PRINT = """
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", rank, attempt)
open(f"printed-{rank}-{attempt}", "w").close()
while not all(os.path.exists(f"printed-{one}-{attempt}") for one in "012"):
    time.sleep(0.01)
if rank == "1":
    raise ValueError("loss is nan")
time.sleep(600)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    [
        ("--launcher-log-ranks", "0,2-2", "--launcher-max-restarts", "1"),
        ("--launcher-torchrun-args", "--local-ranks-filter 0,2"),
    ],
)
def test_a_rank_that_the_console_has_not_has_its_file_and_is_the_reason(start, script, words):
    host = host_with(start, script(ALL_PRINT), *words, nproc=3)
    assert host.wait() == 1, host.log()
    attempts = range(2 if "--launcher-max-restarts" in words else 1)
    shown = sorted(f"rank {rank} {attempt}" for attempt in attempts for rank in (0, 2))
    assert sorted(host.out.splitlines()) == shown
    assert "Traceback" not in host.err and 'raise ValueError("loss is nan")' in host.failure
    for attempt in attempts:
        text = log_of(1, attempt + 1).read_text()
        assert text.startswith(f"rank 1 {attempt}\nTraceback ") and text.endswith("loss is nan\n")


@pytest.mark.torch
def test_what_torchrun_redirects_stays_its_own(start, script):
    path = script("import sys; print('out'); print('err', file=sys.stderr)")
    host = host_with(start, path, "--launcher-torchrun-args", "--redirects 1", nproc=1)
    assert host.wait() == 0, host.log()
    assert sorted(log_of(0).read_text().split()) == ["err", "out"]
    assert host.out == "" and host.err.count("err\n") == 1
    (theirs,) = Path("logs").rglob("stdout.log")
    assert theirs.read_text() == "out\n"


@pytest.mark.torch
def test_a_launcher_below_another_has_no_logs(start, script):
    """It has the variables of the one above, whose files these are, and its mark."""
    host = host_with(start, script("print('inner')"), nproc=1, LAUNCHER_JOB_MARK="above")
    host.ends(0)
    assert host.out == "inner\n" and not log_of(0).exists()
