"""What a rank's exception is called: real scripts under rank.py, and what others print."""

import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANK, run_as_rank

from launcher.result import causes
from launcher.result.causes import LIMIT, Cause, cause_of, of_rank
from launcher.run import rank as in_rank
from launcher.text.words import signal_name


@pytest.fixture
def rank(script):
    """Run a script as a rank: rank(text) -> exit code, what it told."""

    def run(text, *args):
        ran = run_as_rank([sys.executable, RANK, "script", str(script(text)), *args])
        return ran.code, ran.told

    return run


@pytest.fixture
def ended(script, monkeypatch):
    """Run a script in this process: ended(text) -> what a rank would tell of its end."""
    monkeypatch.setattr(in_rank, "_OURS", (*in_rank._OURS, os.path.dirname(__file__)))

    def run(text):
        path = str(script(text))
        monkeypatch.setattr(sys, "argv", [path])
        with pytest.raises(BaseException) as caught:
            exec(compile(text, path, "exec"), {"__name__": "__main__"})
        return [{"end": in_rank.exit_of(caught.value)}]

    return run


def exit_of(told):
    """Return how a rank has ended by what it told; its clues are tested in test_clues.py."""
    end = told[0]["end"]
    chain = causes.expanded([causes.Link(**link) for link in end["chain"]])
    return causes.Exit(end["exit_code"], chain, end["facts"])


def headline(exit_):
    return of_rank("h, rank 0", 0, exit_, 1.0).headline


def is_secondary(exit_):
    return cause_of(exit_) is Cause.SECONDARY


FROM = "(from ZeroDivisionError: division by zero)"
GROUPS = pytest.mark.skipif(sys.version_info < (3, 11), reason="new in 3.11")
SAYS = re.compile(r"# (-?\d+)(?:, line (\d+))?(, secondary)?: (.*)")


def ends():
    """Return the scripts of ends.txt, and what is said of the end of each."""
    for block in Path(__file__).with_name("ends.txt").read_text().strip().split("\n\n")[1:]:
        *lines, said = block.split("\n")
        text = "\n".join(line for line in lines if not line.startswith("## "))
        code, line, secondary, says = SAYS.fullmatch(said).groups()
        marks = GROUPS if "ExceptionGroup" in text else ()
        yield pytest.param(text, says, line, int(code), bool(secondary), marks=marks)


@pytest.mark.parametrize(("text", "says", "line", "code", "secondary"), ends())
def test_how_a_script_ended(ended, text, says, line, code, secondary):
    exit_ = exit_of(ended(text))
    assert exit_.exit_code == code
    assert headline(exit_).startswith(f"h, rank 0 {says}")
    assert is_secondary(exit_) is secondary
    written = of_rank("h", 0, exit_, 1.0).text
    assert len(written) <= LIMIT and written.replace("\n", "").isprintable()
    # A reason has room for little; where lines wrap, marks stand below something else.
    assert "test_raised.py" not in written and "^^^" not in written
    last = [row for row in causes.frames_of(exit_.chain).splitlines() if "script.py" in row][-1:]
    assert (f", line {line}, " in last[0]) if line else not last or "argparse" in written


@pytest.mark.parametrize("character", ["\\0", "\\U0001f600", "\\ud800"])
def test_a_message_of_any_size_is_taken_in(ended, character):
    told = ended(
        "e = None\n"
        "for i in range(100):\n"
        f"    new = type('E' * 10**5, (Exception,), {{}})('{character}' * 10**5)\n"
        "    new.__context__, new.__cause__ = e, ValueError('x' * 10**5) if i % 2 else None\n"
        "    new.__notes__ = ['y' * 10**5] * 100\n"
        "    e = new\n"
        "raise e"
    )
    assert headline(exit_of(told))
    sent = json.dumps(told[0], ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert len(sent) < 1 << 20  # bytes, far below the limit of keepers.py


POOL_OF_PROCESSES = """
from concurrent.futures import ProcessPoolExecutor
def load(_):
    try:
        1 / 0
    except Exception as error:
        raise ValueError("of a child") from error
if __name__ == "__main__":
    list(ProcessPoolExecutor(1).map(load, [1]))
"""
HYDRA = """
import hydra
@hydra.main(version_base=None)
def main(config): raise ValueError('loss is nan')
main()
"""
DATA_LOADER = """
from torch.utils.data import DataLoader
class Samples(list):
    def __getitem__(self, i):
        raise ValueError(f"bad sample {i}")
if __name__ == "__main__":
    list(DataLoader(Samples("ab"), num_workers=1))
"""
SAMPLE_0 = "bad sample 0 (in DataLoader worker process 0)"


@pytest.mark.parametrize(
    ("text", "says", "frame"),
    [
        pytest.param(HYDRA, "loss is nan", "in main", id="hydra"),
        pytest.param(POOL_OF_PROCESSES, f"of a child {FROM}", "in load", id="pool"),
        pytest.param(
            DATA_LOADER, SAMPLE_0, "in __getitem__", id="data loader", marks=pytest.mark.torch
        ),
    ],
)
def test_what_libraries_make_of_an_exception(rank, text, says, frame):
    code, told = rank(text)
    exit_ = exit_of(told)
    assert code == 1 and f"failed with ValueError: {says}" in headline(exit_)
    files = [line for line in causes.frames_of(exit_.chain).splitlines() if "File " in line]
    assert frame in files[-1]


FALSE = """
import threading
class Empty(Exception):
    def __len__(self): return 0
class Worker(threading.Thread):
    def __len__(self): return 0
    def run(self): raise Empty("of a thread")
worker = Worker(name="pin")
worker.start()
worker.join()
raise Empty("of the script")
"""


def test_an_exception_that_is_false_is_one_nevertheless(rank):
    code, (thread, end) = rank(FALSE)
    assert code == 1 and thread["thread"]["name"] == "pin"
    texts = [found["end"]["chain"][0]["message"] for found in (thread["thread"], end)]
    assert texts == ["of a thread", "of the script"]


# Exceptions whose own code runs as they are read, and a script that has replaced what reads them.
UNREADABLE = {
    "replaced": "os.path.dirname = lambda _: sys.exit(0)",
    "has no dict": "@property\n  def __dict__(self): raise ValueError",
    "exits": "@property\n  def __class__(self): sys.exit(0)",
    "is stopped": "@property\n  def __class__(self): os.kill(os.getpid(), 15)",
    "hides": "def with_traceback(self, trace): return None",
    # Python 3.13 itself never ends, as it prints this exception: so it does not print it.
    "never ends": "@property\n  def exceptions(self): return (self,)\n"
    "  sys.excepthook = lambda *_: print('no data', file=sys.stderr)",
}


@pytest.mark.parametrize("code", UNREADABLE.values(), ids=UNREADABLE)
def test_an_exceptions_own_code_does_not_change_how_a_script_ends(script, code):
    kind = "ExceptionGroup" if "exceptions" in code else "Exception"
    if kind not in vars(builtins):
        pytest.skip("new in 3.11")
    path = script(
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"class Odd({kind}):\n  {code}\nraise Odd('no data', [ValueError('bad')])"
    )
    ran = run_as_rank([sys.executable, RANK, "script", str(path)])
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert (ran.code, ran.err) == (plain.returncode, plain.stderr) and ran.code == 1
    assert [one["end"]["exit_code"] for one in ran.told if "end" in one] == [1]


def test_nothing_is_written_to_a_descriptor_that_was_given_to_another(rank):
    """A script may close all descriptors that it does not know, and open its own."""
    code, told = rank(
        "import os, select, socket, sys\n"
        "os.closerange(3, 4096)\n"
        "ends = [end for _ in range(600) for end in socket.socketpair()]\n"
        "if os.fork() == 0: os._exit(0)\n"
        "os.wait()\n"
        "poll = select.poll()\n"
        "for end in ends: poll.register(end, select.POLLIN)\n"
        "sys.excepthook = lambda *_: os._exit(5 if poll.poll(0) else 6)\n"
        "raise ValueError\n"
    )
    assert (code, told) == (6, [])


BY_ITSELF = """
import multiprocessing as m, os, signal, time
def load(end):
    {}
if __name__ == "__main__":
    with_ = m.get_context("{}")
    mine, theirs = with_.Pipe()
    process = with_.Process(target=load, args=(theirs,), name="loader", daemon=True)
    process.start()
    theirs.close()
    {}
"""
KILLS = "os.kill(os.getpid(), signal.{})"
CHILD_ENDS = [
    (KILLS.format("SIGKILL"), "mine.recv()", 9),
    (KILLS.format("SIGKILL"), "try:\n        mine.recv()\n    finally: process.join()", 0),
    # behind another exception
    (KILLS.format("SIGSEGV"), "try: mine.recv()\n    except EOFError: int('x')", 11),
    # somebody ended it, it ended by itself, it lives, or no connection broke
    (KILLS.format("SIGTERM"), "mine.recv()", 0),
    ("end.close(); time.sleep(100)", "mine.recv()", 0),
    (KILLS.format("SIGKILL"), "mine.poll(20); int('x')", 0),
    # or another one than to a process
    (KILLS.format("SIGKILL"), "mine.poll(20); raise ConnectionResetError('a store')", 0),
]


@pytest.mark.parametrize(("child", "text", "number"), CHILD_ENDS, ids=range(len(CHILD_ENDS)))
def test_behind_a_connection_that_broke_is_whether_a_process_was_killed(rank, child, text, number):
    method = "spawn" if number == 11 else "fork"
    code, told = rank(BY_ITSELF.format(child, method, text))
    assert code == 1
    end = told[0]["end"]
    assert end["counted"] == ["memory"] * ("recv" in text)  # may explain what broke
    (killed,) = end["facts"] or [""]
    name = signal_name(number) if number else ""
    process, _, how = killed.partition(" was killed by ")
    assert how == name and process.startswith("its child process loader (pid " if number else "")


# What others print. Each is the message of one exception, as a process of theirs raised it.

WORKER = (
    "Caught ValueError in DataLoader worker process 3.\n"
    "Original Traceback (most recent call last):\n"
    '  File "/t/torch/utils/data/_utils/worker.py", line 309, in _worker_loop\n'
    "    data = fetcher.fetch(index)\n"
    '  File "/t/train.py", line 12, in __getitem__\n'
    "    raise ValueError('bad sample 7')\n"
    "ValueError: bad sample 7\nof two lines\n"
)
SPAWNED = (
    "\n\n-- Process 1 terminated with the following error:\n"
    "Traceback (most recent call last):\n"
    '  File "/t/a.py", line 1, in load\n'
    "    1 / 0\n"
    "ZeroDivisionError: division by zero\n\n"
    "During handling of the above exception, another exception occurred:\n\n"
    "Traceback (most recent call last):\n"
    '  File "/t/a.py", line 3, in train\n'
    "    raise E\n"
    "__mp_main__.E\n"
)
RPC = (
    "ValueError: On WorkerInfo(id=1, name=worker1):\nValueError('bad')\n"
    "Traceback (most recent call last):\n"
    '  File "/t/torch/distributed/rpc/internal.py", line 211, in _run_function\n'
    "    result = python_udf.func(*python_udf.args, **python_udf.kwargs)\n"
    '  File "/t/a.py", line 7, in step\n'
    "    raise ValueError('bad')\n"
    "ValueError: bad\n\n\nAt:\n  /t/torch/distributed/rpc/internal.py(236): _handle_exception\n"
)
# Of torch.distributed.checkpoint: every rank raises it, with the errors of those that have failed.
OF_CHECKPOINT = "".join(
    f"Traceback (most recent call last): (RANK {rank})\n"
    f'  File "/t/torch/distributed/checkpoint/utils.py", line {rank}, in all_reduce\n'
    f"    local_data = map_fun()\nPermissionError: [Errno 13] Permission denied: '/ckpt/{rank}'\n"
    for rank in (1, 3)
)
CHECKPOINT = f"CheckpointException ranks:dict_keys([1, 3])\n{OF_CHECKPOINT}"
OWN_TEXT = (
    "training failed:\nTraceback (most recent call last):\n"
    '  File "/t/a.py", line 1, in load\n    1 / 0\nZeroDivisionError: division by zero\n'
)


SAMPLE = "ValueError: bad sample 7 of two lines"
SPAWN_RAISED = "torch.multiprocessing.spawn.ProcessRaisedException"
DENIED = "PermissionError: [Errno 13] Permission denied: '/ckpt/3'"
OF_ZERO = "ZeroDivisionError: division by zero)"
TOLD = [
    # What is raised, with which text; how the reason begins; the innermost frame.
    ("ValueError", WORKER, f"{SAMPLE} (in DataLoader worker process 3)", "line 12"),
    (SPAWN_RAISED, SPAWNED, f"E: (in spawned process 1) (while handling {OF_ZERO}", "line 3"),
    ("ValueError", RPC, "ValueError: bad (on worker1)", "line 7"),
    ("CheckpointException", CHECKPOINT, f"{DENIED} (on rank 3, in a checkpoint)", "line 3"),
    ("RuntimeError", OWN_TEXT, f"RuntimeError: training failed: (from {OF_ZERO}", ""),
    # Cut in the middle by the sender, or no traceback at all.
    ("ValueError", WORKER.replace("data = fetcher", "data ... er"), SAMPLE[:28], "line 12"),
    ("ValueError", "Traceback (most recent call last):\n", "ValueError: Traceback", ""),
]


@pytest.mark.parametrize(("exception", "message", "says", "line"), TOLD, ids=range(len(TOLD)))
def test_exceptions_that_are_told_as_text(exception, message, says, line):
    links = causes.expanded([causes.Link(exception, message, "  local\n")])
    assert causes.headline(links).startswith(f"failed with {says}")
    assert causes.frames_of(links).splitlines()[-2:][0].count(line) or line == ""
    assert not any(map(causes.is_secondary, links))


PYTHON, SITE = "/usr/lib/python3.11", "/usr/lib/python3.11/site-packages"
CONNECTION = f"{PYTHON}/multiprocessing/connection.py"
GLOO = "[/b/third_party/gloo/gloo/transport/tcp/"
# What torch 2.13 says whose peer has ended, or does not answer; run, not only read.
OF_TORCH = [
    f"RuntimeError: {GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:24986. This is",
    f"RuntimeError: {GLOO}unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation",
    "RuntimeError: eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:2)",
    f"RuntimeError: Gloo connectFullMesh failed with {GLOO}pair.cc:152] timed out connecting: "
    "SO_ERROR: Connection refused, remote=[127.0.0.1]:5",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely",
    "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /0//cpu//0/1",
    # read: there is no NCCL without a GPU
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited",
]
INNERMOST = ["/t/train.py", f"{SITE}/torch/distributed/distributed_c10d.py", "<string>"]


@pytest.mark.parametrize("said", OF_TORCH)
@pytest.mark.parametrize("file", INNERMOST)
def test_what_only_collectives_say_may_be_secondary_wherever_it_is_raised(said, file):
    exception, _, message = said.partition(": ")
    frames = f'  File "{file}", line 7, in f\n    work.wait()'
    assert causes.is_secondary(causes.Link(exception, message, frames))
    # As a message of one's own, or told by another process.
    assert causes.is_secondary(causes.Link("TrainingError", said, frames))
    told = WORKER.replace("ValueError: bad sample 7", said)
    assert any(map(causes.is_secondary, causes.expanded([causes.Link("RuntimeError", told)])))


def test_another_connection_s_error_is_the_rank_s_own():
    frames = f'  File "{SITE}/torch/distributed/distributed_c10d.py", line 7, in f\n    work.wait()'
    link = causes.Link("aiohttp.ClientConnectionResetError", "cannot write to a closing transport")
    assert not causes.is_secondary(link._replace(frames=frames))


SAID = [("ConnectionResetError", "[Errno 104] Connection reset by peer"), ("EOFError", "")]
SAID += [("BrokenPipeError", "[Errno 32] Broken pipe"), ("RuntimeError", "Socket Timeout")]
PLACES = [
    # frames, the innermost last; whether a connection that breaks there leads to another rank
    ((f"{SITE}/torch/distributed/distributed_c10d.py",), True),
    (("/t/train.py", f"{SITE}/torch/_tensor.py", f"{SITE}/torch/autograd/graph.py"), True),
    ((f"{SITE}/torch/nn/parallel/distributed.py",), True),
    ((f"{SITE}/torch/multiprocessing/reductions.py", CONNECTION), True),
    ((f"{PYTHON}/multiprocessing/managers.py", CONNECTION), True),
    ((f"{PYTHON}/http/client.py", f"{PYTHON}/socket.py", f"{PYTHON}/ssl.py"), False),
    ((f"{SITE}/torch/hub.py", f"{PYTHON}/urllib/request.py", f"{PYTHON}/http/client.py"), False),
    ((f"{SITE}/torch/distributed/checkpoint/filesystem.py",), False),
    # a dataset's worker, a hook of autograd, a server of multiprocessing's that downloads
    ((f"{SITE}/torch/utils/data/_utils/fetch.py", "/t/train.py"), False),
    ((f"{SITE}/torch/autograd/graph.py", "/t/train.py"), False),
    ((f"{PYTHON}/multiprocessing/managers.py", "/t/a.py", f"{PYTHON}/http/client.py"), False),
    ((), False),
]


@pytest.mark.parametrize(("files", "secondary"), PLACES, ids=range(len(PLACES)))
@pytest.mark.parametrize(("exception", "message"), SAID, ids=[name for name, _ in SAID])
def test_what_anybody_says_is_classed_by_where_it_is_raised(files, secondary, exception, message):
    frames = "\n".join(f'  File "{file}", line 7, in f\n    recv()\n    ^^^^^^' for file in files)
    assert causes.is_secondary(causes.Link(exception, message, frames)) is secondary
    # The same from another process, whose traceback is printed.
    head = "Caught E in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n"
    told = f"{head}{frames}\n{causes.Link(exception, message).title()}\n"
    links = causes.expanded([causes.Link("RuntimeError", told)])
    assert any(map(causes.is_secondary, links)) is secondary
