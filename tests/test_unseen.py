"""What ends a rank that does not raise: crashes, and what other threads raise. No torch."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import RANK, run_as_rank

from launcher.result import causes
from launcher.watch.stacks import crash_in, frames_of, place


@pytest.fixture
def rank(script):
    """Run a script as a rank, and by Python alone: rank(text) -> what each did."""

    def run(text, **environ):
        path, env = str(script(text)), {**os.environ, **environ}
        ran = run_as_rank([sys.executable, RANK, "script", path], env)
        argv = [sys.executable, path]
        plain = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
        return SimpleNamespace(
            **ran._asdict(),
            end=ran.end,
            plain=(plain.returncode, plain.stdout, plain.stderr),
            calls=crash_in(ran.crash, -ran.code) if ran.code < 0 else (),
        )

    return run


DECODE = "import ctypes\ndef decode():\n    ctypes.string_at(0)\n"
KILL = "import os, signal\ndef work():\n    os.kill(os.getpid(), signal.SIG{})\nwork()"


C_THREAD = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.abort, None)
time.sleep(60)
"""
THREAD = "import threading, time\nthreading.Thread(target=decode).start()\ntime.sleep(60)"
# A script that crashes, the place, and the innermost function: a library's is below the script's.
PLACES = [(KILL.format(name), "work, script.py:3", "work") for name in ("SEGV", "BUS", "FPE")]
PLACES += [(KILL.format(name), "work, script.py:3", "work") for name in ("ILL", "ABRT")]
PLACES += [(f"{DECODE}decode()", "decode, script.py:3", "string_at")]
PLACES += [(f"{DECODE}{THREAD}", "decode, script.py:3", "string_at"), (C_THREAD, "", "")]


@pytest.mark.parametrize(("text", "where", "innermost"), PLACES)
def test_a_crash_says_where_it_was_and_nothing_on_stderr(rank, text, where, innermost):
    ran = rank(text)
    assert ran.end == ran.plain and "Fatal Python error" in ran.crash
    assert place(ran.calls) == where and "rank.py" not in frames_of(ran.calls)
    assert [one.function for one in ran.calls][-1:] == [innermost] * bool(innermost)


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("import faulthandler; faulthandler.enable()\n", {}),
        ("import faulthandler; faulthandler.disable()\n", {}),
        ("", {"PYTHONFAULTHANDLER": "1"}),
    ],
    ids=["script", "disabled", "before the script"],
)
def test_what_the_user_does_with_faulthandler_counts(rank, text, environ):
    ran = rank(text + KILL.format("SEGV"), **environ)
    assert ran.code == -signal.SIGSEGV and ran.crash == ""
    assert ("Fatal Python error" in ran.end[2]) is ("disable" not in text)


# The number is the file's of somebody else by then, or may be.
CLOSES = """
import os, resource, signal
def after(closes, opens):
    os.closerange(3, closes)
    for i in range(opens):
        os.open(f"data-{i}", os.O_CREAT | os.O_RDWR, 0o600)
"""
FORK = """
pid = os.fork()
if pid == 0:
    after(5000, 1100)
    os.kill(os.getpid(), signal.SIGSEGV)
assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
"""
CHILDREN = [
    CLOSES + "after(5000, 500)\nos.kill(os.getpid(), signal.SIGSEGV)",
    CLOSES + FORK,
    # what takes this process's place
    CLOSES + "import sys\nos.execv(sys.executable, [sys.executable, '-c', '''import os, signal\n"
    "assert len(os.listdir('/proc/self/fd')) <= 4\nos.kill(os.getpid(), signal.SIGSEGV)'''])",
]


@pytest.mark.parametrize("text", CHILDREN, ids=["closes all", "fork", "exec"])
def test_a_crash_is_never_written_to_another_file(rank, tmp_path, text):
    ran = rank(text)
    assert ran.code in (0, -signal.SIGSEGV), ran.end
    assert ran.crash == ""
    assert not [path for path in tmp_path.glob("data-*") if path.stat().st_size]


@pytest.mark.parametrize("end", ["raise ValueError", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_a_script_that_closes_low_descriptors_is_heard(rank, end):
    ran = rank(CLOSES + f"after(999, 500)\n{end}")
    assert ran.end == ran.plain
    assert [*map(list, ran.told)] == [["end"]] * ("raise" in end)
    assert ("Fatal Python error" in ran.crash) is ("kill" in end)


FORKS = "if os.fork() == 0:\n    {}\n    print(faulthandler.is_enabled(), flush=True)\n"
FORKS = f"import faulthandler, os, signal\n{{}}\n{FORKS}    os._exit(0)\nos.wait()"
HANDLES = (
    "signal.signal(signal.SIGFPE, lambda *_: print('handled', flush=True))\n"
    "signal.signal(signal.SIGBUS, signal.SIG_IGN)"
)
CRASHES = "os.kill(os.getpid(), signal.SIGFPE); os.kill(os.getpid(), signal.SIGBUS)"


@pytest.mark.parametrize(
    ("before", "after", "out"),
    [(HANDLES, CRASHES, "handled\nFalse\n"), ("faulthandler.enable()", "pass", "True\n")],
)
def test_a_fork_keeps_what_the_script_has_set(rank, before, after, out):
    ran = rank(FORKS.format(before, after))
    assert ran.end == ran.plain == (0, out, "")


@pytest.mark.parametrize(("limit", "has_place"), [(64, False), (512, True)])
def test_a_process_that_may_have_very_few_descriptors_has_no_place(
    rank, tmp_path, limit, has_place
):
    few = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    (tmp_path / "sitecustomize.py").write_text(few)
    ran = rank(KILL.format("SEGV"), PYTHONPATH=str(tmp_path))
    assert ran.end == ran.plain and ran.code == -signal.SIGSEGV
    assert bool(ran.crash) == has_place


def test_of_what_was_written_the_crash_is_read():
    """What C has forked without Python's knowledge may have written before."""
    stack = 'Stack (most recent call first):\n  File "/t/a.py", line 7 in f\n'
    fatal = f"Fatal Python error: {{}}\n\n{stack}"
    text = fatal.format("Aborted") + fatal.format("Segmentation fault")
    assert place(crash_in(text, signal.SIGSEGV)) == "f, a.py:7"
    assert crash_in(text, signal.SIGABRT) == crash_in("", signal.SIGSEGV) == ()
    later = fatal.format("Floating-point exception")  # as from Python 3.12 on
    assert place(crash_in(later, signal.SIGFPE)) == "f, a.py:7"
    assert crash_in(fatal.format("Bus error\nx"), signal.SIGSEGV) == ()
    # The script's own faulthandler shows all threads, among other output.
    own = stack.replace("Stack", "Current thread 0x7f", 1)
    others = 'Thread 0x7e (most recent call first):\n  File "/t/b.py", line 8 in g\n\n'
    text = f"step 1\nFatal Python error: Segmentation fault\n\n{others}{own}\n{others}"
    assert place(crash_in(text, signal.SIGSEGV)) == "f, a.py:7"


# What threads raise.

PIN = """
import sys, threading, time
def pin():
    try:
        {}["page"]
    except KeyError as error:
        raise ValueError("bad file") from error
thread = threading.Thread(target=pin, name="pin")
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    "text",
    [
        "raise RuntimeError('no data')",
        "sys.exit(3)",
        "import os; os._exit(4)",
        "threading.Thread(target=sys.exit, args=(1,)).start()",
        # a hook of the script's that is not called, or calls the one before it
        "hook = threading.excepthook\nthreading.excepthook = lambda args: hook(args)\n"
        "time.sleep(1)\nthread = threading.Thread(target=pin, name='it')\nthread.start()",
    ],
    ids=["raises", "exit", "_exit", "an exit of a thread", "a hook"],
)
def test_what_a_thread_raises_is_told_and_shown_as_without_us(rank, text):
    ran = rank(PIN + text)
    assert ran.end == ran.plain
    told = [message["thread"] for message in ran.told if "thread" in message]
    assert [thread["name"] for thread in told] == (["pin", "it"] if "hook" in text else ["pin"])
    chain = causes.expanded([causes.Link(**link) for link in told[0]["end"]["chain"]])
    assert causes.aside_of(chain) == "raised ValueError: bad file (from KeyError: 'page')"
    assert "rank.py" not in chain[0].frames


def test_threads_that_raise_all_the_time_are_told_of_seldom(rank):
    ran = rank(
        "import threading\nfor i in range(300):\n"
        "  t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()"
    )
    assert ran.code == 0 and 1 <= len(ran.told) < 100


KEEPS = """
import gc, threading, weakref
class Batch: pass
def pin(batch):
    raise ValueError("bad")
batch = Batch()
seen = weakref.ref(batch)
gc.disable()
thread = threading.Thread(target=pin, args=(batch,))
thread.start(); thread.join()
del batch, thread
print(seen())
"""
AWKWARD = """
import threading
class E(Exception):
    def __str__(self): raise SystemExit(9)
    @property
    def __traceback__(self): raise KeyError
def pin(): raise E
thread = threading.Thread(target=pin, name="a\\nb" * 1000)
thread.start(); thread.join()
"""


@pytest.mark.parametrize("text", [KEEPS, AWKWARD])
def test_telling_of_a_thread_keeps_nothing_and_raises_nothing(rank, text):
    ran = rank(text)
    assert ran.end == ran.plain and ran.code == 0
    assert len([said for said in ran.told if "thread" in said]) == 1
